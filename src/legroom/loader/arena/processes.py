"""Other processes as a worker sees them: whether it must end, whether another worker is blocked.

multiprocessing tells a worker that its parent has ended by a pipe. Workers that are forked later inherit that pipe and
keep it open, so each of thirty workers saw a parent for as long as a later worker lived. torch remembers who the parent
is after ``worker_init_fn``, which is too late where the program was killed before. Here the kernel is asked.

torch's loop asks between two batches. A worker whose sample takes long, or whose batch waits for a pipe that no process
reads, would not end: a thread ends it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import threading
import time
from collections.abc import Callable

from legroom.loader.torch_internals import watch_parent, workers_ending

_PARENT_S = 1.0  # between two checks of the program
_GRACE_S = 10.0  # for a worker to end by itself after its program: torch's loop asks every five
_BLOCKED_S = 1.0  # without a sign of work
_LOOK_S = 0.05
_CPU = 0.2  # of a core: below it, a process waits
_GROWTH = 1 << 20
_asked: tuple[int, Callable[[], bool] | None] = (0, None)  # of which process, and how to ask


def parent_lives() -> bool:
    """Whether the program that this worker works for is there, however it was started or ended."""
    parent = multiprocessing.parent_process()
    if parent is None or parent.pid is None:
        return True
    if os.getppid() == parent.pid:
        return True
    # Its parent has ended, or is the fork server, which is another process than the program.
    return _runs(parent.pid)


def must_end() -> bool:
    """Whether this worker has nothing left to wait for: its loader is ending its workers, or its program has ended."""
    global _asked
    if _asked[0] != os.getpid():
        _asked = os.getpid(), workers_ending()
    ending = _asked[1]
    return (ending is not None and ending()) or not parent_lives()


def end_if_told() -> None:
    """End this worker where it must; with 0, because torch reports any other exit code as a failure."""
    if must_end():
        raise SystemExit(0)


class Guarded:
    """A ``worker_init_fn`` around the user's, for workers that end with their program."""

    def __init__(self, before: Callable[[int], None] | None) -> None:
        self._before = before

    def __call__(self, worker: int) -> None:
        """In a worker, before it draws."""
        watch_parent(parent_lives)
        # Without the thread, where no more can be started, torch's loop ends the worker.
        with contextlib.suppress(RuntimeError):
            threading.Thread(target=_end_after_program, name="legroom-parent", daemon=True).start()
        if self._before is not None:
            self._before(worker)


def _end_after_program() -> None:
    """End this worker when its program has ended, whatever it is doing."""
    while parent_lives():
        time.sleep(_PARENT_S)
    time.sleep(_GRACE_S)
    os._exit(0)  # not sys.exit, which would wait for the thread that writes to the pipe


def _runs(pid: int) -> bool:
    """Whether a process with this id that is older than this one has not ended."""
    found, mine = _stat(pid), _stat(os.getpid())
    if found is not None and mine is not None:
        return found.state not in "ZX" and found.started <= mine.started
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        return True  # it is there, and of another user
    return True


class _Stat:
    """What /proc/PID/stat says."""

    __slots__ = ("cpu_s", "resident", "started", "state")

    def __init__(self, text: str) -> None:
        fields = text[text.rindex(")") + 2 :].split()
        self.state = fields[0]
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started = int(fields[19])
        self.resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")


def _stat(pid: int) -> _Stat | None:
    try:
        with open(f"/proc/{pid}/stat") as file:
            return _Stat(file.read())
    except (OSError, ValueError, IndexError):
        return None


class Blocked:
    """Whether a process has been waiting for something, neither computing nor growing, for a second."""

    def __init__(self) -> None:
        self._since = self._looked = 0.0
        self._then: _Stat | None = None

    def now(self, pid: int) -> bool:
        """Whether it has been until now; to be asked often."""
        at = time.monotonic()
        if at < self._looked + _LOOK_S:
            return False
        self._looked = at
        found, then = _stat(pid), self._then
        if found is None:
            self._then = None
            return False
        if (
            then is None
            or found.state == "R"
            or found.cpu_s - then.cpu_s > _CPU * max(_BLOCKED_S, at - self._since)
            or found.resident > then.resident + _GROWTH
        ):
            self._since, self._then = at, found
            return False
        return at - self._since >= _BLOCKED_S
