"""What a process takes that has imported torch and done nothing else, and a worker of it: asked of real ones.

Covers: starting one where it may be too much, and ending it before it is. Does not cover: a worker of a training that
is loaded already (private.py), its samples (measuring.py).

The process that tries is the one that goes: it offers itself to the OOM killer, and is ended here while there is still
something left. Then all that is known is that it takes more.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache

from legroom.advice.memory_need import SPARE
from legroom.loader.arena.refusal import left
from legroom.loader.measure.private import idle_worker, private_bytes

_LOOK_S = 0.02


@dataclass(frozen=True, slots=True)
class Bare:
    """Private bytes; None where they could not be had."""

    process: int | None = None  # the interpreter with torch
    forked: int | None = None  # a worker that it forks
    stopped: bool = (
        False  # before it was there: ``process`` is what it had taken, and all that was left but a spare
    )

    def worker(self, method: str) -> int | None:
        """A worker that starts by this method; one that is not forked imports all by itself."""
        return self.forked if method == "fork" else self.process


@cache
def bare(timeout: float = 120.0) -> Bare:
    """Measured once in this process's life."""
    before = left()
    line = [
        sys.executable,
        "-c",
        f"import sys; sys.path[:0] = {sys.path!r}; from {__name__} import main; main()",
    ]
    try:
        child = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
    except OSError:
        return Bare()
    with child:
        try:
            until = time.monotonic() + timeout
            while child.poll() is None and time.monotonic() < until:
                now = left()
                if before is not None and now is not None and now.free < SPARE:
                    return Bare(process=max(0, before.free - now.free), stopped=True)
                time.sleep(_LOOK_S)
        finally:
            child.kill()
        told = child.stdout.read() if child.stdout is not None and child.returncode == 0 else b""
    try:
        return Bare(**json.loads(told))
    except (ValueError, TypeError):
        return Bare()


def main() -> None:
    """In the process that is measured."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:  # not Linux, or a sandbox without it
        pass
    import torch.utils.data  # noqa: F401  the thing to measure

    forked = idle_worker() if sys.platform == "linux" else None
    sys.stdout.write(json.dumps({"process": private_bytes(), "forked": forked}))
