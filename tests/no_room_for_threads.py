"""Run a program in which ``ulimit -v`` leaves no address space for another thread."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

# Less than a thread needs (a malloc arena of 64 MB and its stack), and enough for what a program imports later.
_LIMIT = """
import os, resource
def leave_no_room_for_threads():
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
"""


def run_program(text: str, cwd: Path, timeout: float = 200.0, **environment: str) -> subprocess.CompletedProcess[str]:
    """Its result; the program calls ``leave_no_room_for_threads()`` after its imports.

    A program that starts a thread all the same hangs: CPython waits for a thread that ran out of memory before it began.
    """
    return subprocess.run(
        [sys.executable, "-c", _LIMIT + text],
        capture_output=True,
        text=True,
        timeout=timeout,
        cwd=cwd,
        env={**os.environ, "XDG_RUNTIME_DIR": str(cwd), **environment},
    )
