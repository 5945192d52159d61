"""What a dataset costs: a few of its samples and one batch, drawn where they can do no harm.

Covers: bytes and seconds, a child process that draws, names on the command line. Does not cover: settings that follow
(tune/), whether it fits (preflight.py).
"""
