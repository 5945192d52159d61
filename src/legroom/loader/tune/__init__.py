"""``legroom.tune``: settings chosen by measuring.

Covers: short attempts, what transport and a step cost, settings that worked. Does not cover: the choice itself, which
is pure (legroom.budget).
"""
