"""Which descriptors this process has open, by number and by what each is.

Tests compare sets, not counts: what an earlier test left to the garbage collector may be closed during a later one.
"""

from __future__ import annotations

import gc
import os
import time


def open_descriptors() -> set[tuple[str, str]]:
    """Number and target of each; empty where there is no /proc."""
    found = set()
    for number in os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []:
        try:
            found.add((number, os.readlink(f"/proc/self/fd/{number}")))
        except OSError:
            pass  # the listing's own
    return found


def opened_since(before: set[tuple[str, str]], expected: int = 0) -> set[tuple[str, str]]:
    """Those that were not open before, as soon as there are so many, at the latest after a minute.

    Threads that fill pages or look at free memory open files for a moment, and on a busy machine that can be long.
    """
    deadline, pause = time.monotonic() + 60, 0.0
    while len(found := open_descriptors() - before) != expected and time.monotonic() < deadline:
        gc.collect()  # an error's traceback may hold what it was raised over
        time.sleep(pause)
        pause = 0.01
    return found
