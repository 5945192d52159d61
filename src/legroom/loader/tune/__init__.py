"""``legroom.tune``: DataLoader settings chosen by measuring.

    tuning            legroom.tune, and the same for a dataset that is named on the command line
    settings_history  remembers between runs the settings that worked

The measurements are in ``loader/measure``, the choice is in ``legroom.advice``.
"""
