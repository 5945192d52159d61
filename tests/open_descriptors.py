"""Which descriptors this process has open, by number and by what each is.

Tests compare sets, not counts: what an earlier test left to the garbage collector may be closed during a later one.
"""

from __future__ import annotations

import os


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each; empty where there is no /proc."""
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            pass  # the listing's own
    return found
