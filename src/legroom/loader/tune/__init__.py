"""``legroom.tune``: DataLoader settings chosen by measuring.

    legroom_tune         legroom.tune, and the same for a dataset that is named on the command line
    remembered_settings  settings that worked, kept between runs by script and dataset; not used where more memory is

The measurements are in ``loader/measure``, the choice is in ``legroom.advice``.
"""
