"""Children that do not outlive whoever started them; as a program, `legroom` on such a tether.

Covers: the kernel's signal to a child when its parent dies (PR_SET_PDEATHSIG). Does not cover: ending children in good
order (job.py), systems other than Linux.

    python -m legroom.demo.tether run … -- …     the verb, ended politely (SIGTERM) when its parent is gone

The variable TETHER names the parent that a child must have; one that was orphaned before it could ask for the signal
ends at once.
"""

from __future__ import annotations

import os
import runpy
import signal
import sys

TETHER = "LEGROOM_DEMO_TETHER"
_PR_SET_PDEATHSIG = 1


def tether(number: int) -> None:
    """Get that signal when the parent ends; children started from now on are expected to be ours."""
    if sys.platform != "linux":
        return
    import ctypes

    expected = os.environ.get(TETHER, "")
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number, 0, 0, 0)
    if expected.isdecimal() and os.getppid() != int(expected):
        raise SystemExit(128 + number)
    os.environ[TETHER] = str(os.getpid())


def worker(_number: int) -> None:
    """For a loader's worker: dies with its loader."""
    tether(signal.SIGKILL)


if __name__ == "__main__":
    tether(signal.SIGTERM)
    runpy.run_module(
        "legroom", run_name="__main__"
    )  # the command line is a layer above: by name, not by import
