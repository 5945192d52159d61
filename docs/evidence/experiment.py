"""What every experiment shares: rigs, children that are cleaned up, a table, and the last line.

Covers: asking for rigs and saying why they are needed, running a child and ending it with everything it made,
printing results. Does not cover: any claim; those are one script each.

An experiment ends by ``verdict`` or ``not_shown``: its last line is ``holds: yes``, ``holds: no (why)`` or
``holds: not shown here (why)``, and its status is 1 for ``no`` alone.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

sys.dont_write_bytecode = True  # a __pycache__ here would be published with the pages
sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tests"))
import rigs  # noqa: E402

MB = 1 << 20
LIMIT_S = 200  # a child that takes longer hangs, however busy the machine is

WHY_ROOT = {
    "mount": "a /dev/shm of its own size is a mount, and the machine's own must stay as it is",
    "cgroup": "a memory limit of one's own is a cgroup",
    "swap": "a swap file is switched on and off again",
}


def _stop(signum: int, frame: object) -> NoReturn:
    raise SystemExit(128 + signum)  # unwinds the `with` blocks, so that cgroups, swap and mounts go


signal.signal(signal.SIGTERM, _stop)
# A forked worker has nothing to unwind, and must end when its pool or loader says so.
os.register_at_fork(after_in_child=lambda: signal.signal(signal.SIGTERM, signal.SIG_DFL))


def need(*names: str) -> None:
    """End here, with the reason, where one of these rigs cannot be had."""
    for name in names:
        if reason := rigs.WHY_NOT[name]():
            not_shown(f"{reason}: {WHY_ROOT[name]}")


def need_module(name: str) -> None:
    """End here where a package that the claim is about is not installed."""
    import importlib.util

    if importlib.util.find_spec(name) is None:
        not_shown(f"{name} is not installed")


def role(script: str, *arguments: object) -> list[str]:
    """This very script again, in another role: ``role(__file__, "inside", 64)``."""
    return [sys.executable, "-B", script, *map(str, arguments)]


def run(command: Sequence[str], *, show: bool = False) -> subprocess.CompletedProcess[str]:
    """Run a child; whatever happens here, it is asked to clean up and does not outlive us."""
    pipe = None if show else subprocess.PIPE
    # Workers that are killed leave their sockets' folders behind: in a folder of ours, so that they go with it.
    with tempfile.TemporaryDirectory(prefix="legroom-evidence-") as folder:
        env = {**os.environ, "TMPDIR": folder}
        with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, env=env) as child:
            try:
                out, err = child.communicate(timeout=LIMIT_S)
            finally:
                if child.poll() is None:
                    child.terminate()
                    try:
                        child.wait(10)
                    except subprocess.TimeoutExpired:
                        child.kill()
    return subprocess.CompletedProcess(command, child.returncode, out or "", err or "")


def ending(returncode: int) -> str:
    """How a child ended, in words: ``exit 0``, ``SIGBUS``."""
    return f"exit {returncode}" if returncode >= 0 else signal.Signals(-returncode).name


def shm_used() -> int:
    """Bytes taken from the filesystem at /dev/shm."""
    room = os.statvfs("/dev/shm")
    return (room.f_blocks - room.f_bfree) * room.f_frsize


def children_wait() -> bool:
    """Whether no thread of a child process runs or waits for a core, which on a busy machine can take long."""
    for task in Path("/proc/self/task").iterdir():
        for child in (task / "children").read_text().split():
            try:
                threads = [thread.read_text() for thread in Path("/proc", child, "task").glob("*/stat")]
            except OSError:  # it has ended
                continue
            if any(stat.rpartition(")")[2].split()[0] in "RD" for stat in threads):
                return False
    return True


class ShmPeak:
    """The most that /dev/shm held during a block, above what it held before."""

    def __init__(self) -> None:
        self.most, self._before, self._done = 0, 0, threading.Event()
        self._watcher = threading.Thread(target=self._watch)

    def __enter__(self) -> ShmPeak:
        self._before = shm_used()
        self._watcher.start()
        return self

    def __exit__(self, *problem: object) -> None:
        self._done.set()
        self._watcher.join()

    def _watch(self) -> None:
        while not self._done.wait(0.0002):
            self.most = max(self.most, shm_used() - self._before)


def mb(size: float) -> str:
    """Mebibytes, as the tables print them."""
    return f"{size / MB:.1f} MiB"


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Columns of one width, to be read in a terminal and in a page."""
    lines = [list(head), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print(flush=True)


def verdict(checks: dict[str, bool]) -> NoReturn:
    """The last line: yes when every check held, else no and which did not."""
    failed = [what for what, held in checks.items() if not held]
    print(f"holds: no ({'; '.join(failed)})" if failed else "holds: yes", flush=True)
    raise SystemExit(1 if failed else 0)


def not_shown(reason: str) -> NoReturn:
    """The last line where this machine cannot show it."""
    print(f"holds: not shown here ({reason})", flush=True)
    raise SystemExit(0)
