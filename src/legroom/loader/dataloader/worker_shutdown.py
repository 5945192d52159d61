"""A worker process: when it must end, whether another worker is blocked, and stopping it before memory runs out.

This is the only module that raises an exception in another thread or ends a worker with ``os._exit``.

multiprocessing signals the end of the parent through a pipe. Workers that are forked later inherit the pipe and keep it
open, so each of thirty workers saw a parent for as long as a later worker lived. torch stores the parent's pid after
``worker_init_fn``, which is too late if the program was killed before. Here the kernel is asked.

torch's loop checks its parent between two batches. A worker that takes long for a sample, or that writes to a pipe that
no process reads, would not end: a thread ends it.
"""

from __future__ import annotations

import ctypes
import mmap
import multiprocessing
import os
import sys
import threading
import time
from collections.abc import Callable
from enum import Enum, auto

from legroom.loader.dataloader.torch_internals import add_liveness_check, workers_ending
from legroom.system.processes_and_threads import start_daemon_thread

_PARENT_S = 1.0  # between two checks of the program
_GRACE_S = 10.0  # for a worker to end by itself after its program: torch's loop checks every five
_BLOCKED_S = 1.0  # without a sign of work
_STAT_S = 0.05
_CPU = 0.2  # of a core: a process that uses less is waiting
_GROWTH = 1 << 20
_GROWTH_POLL_S = 0.002
_set_async_exc = getattr(ctypes.pythonapi, "PyThreadState_SetAsyncExc", None)
_ending: tuple[int, Callable[[], bool] | None] = (0, None)  # pid, and how to read torch's event in that process


IMPORTED_MAIN = 78  # exit status of a worker whose import of the main script started workers itself (EX_CONFIG)


def exit_if_importing_main(message: Callable[[], str]) -> None:
    """End this process with a message if it is a worker that still imports the main script.

    The script does not check ``__name__``, so that each worker would start the training again. The exit status shows
    the program why its worker ended. The fork server replaces the status of a SystemExit by 1.
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        sys.stderr.write(message() + "\n")
        sys.stderr.flush()
        os._exit(IMPORTED_MAIN)


def program_alive() -> bool:
    """Whether the program that started this worker is running, with any start method."""
    parent = multiprocessing.parent_process()
    program = None if parent is None else parent.pid  # read once, because this runs for every batch
    # Where it is not the parent, the parent has ended, or is the fork server, which is not the program.
    return program is None or os.getppid() == program or _runs(program)


def must_end() -> bool:
    """Whether this worker must end: its loader is ending its workers, or its program has ended."""
    global _ending
    if _ending[0] != os.getpid():
        _ending = os.getpid(), workers_ending()
    ending = _ending[1]
    return (ending is not None and ending()) or not program_alive()


def exit_if_ending() -> None:
    """End this worker if it must end; with 0, because torch reports any other exit code as a failure."""
    if must_end():
        raise SystemExit(0)


class EndWithProgram:
    """A ``worker_init_fn`` around the user's that makes workers end with their program."""

    def __init__(self, init_fn: Callable[[int], None] | None) -> None:
        self._init_fn = init_fn

    def __call__(self, worker: int) -> None:
        add_liveness_check(program_alive)
        # Where no thread can be started, torch's loop ends the worker.
        start_daemon_thread(_end_after_program, "legroom-parent")
        if self._init_fn is not None:
            self._init_fn(worker)


def _end_after_program() -> None:
    while program_alive():
        time.sleep(_PARENT_S)
    time.sleep(_GRACE_S)
    os._exit(0)  # not sys.exit, which would wait for the thread that writes to the pipe


def _runs(pid: int) -> bool:
    """Whether a process with this pid that is older than this one is running."""
    found, mine = _Stat.of(pid), _Stat.of(os.getpid())
    if found is not None and mine is not None:
        return not found.ended and found.started <= mine.started
    return exists(pid)


def exists(pid: int) -> bool:
    """Whether there is a process with this pid."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:  # it belongs to another user
        return True
    return True


class _Stat:
    """Fields of /proc/PID/stat."""

    __slots__ = ("cpu_s", "resident", "started", "state")

    def __init__(self, text: str) -> None:
        fields = text[text.rindex(")") + 2 :].split()
        self.state = fields[0]
        self.cpu_s = (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")
        self.started = int(fields[19])
        self.resident = int(fields[21]) * os.sysconf("SC_PAGE_SIZE")

    @classmethod
    def of(cls, pid: int) -> _Stat | None:
        try:
            with open(f"/proc/{pid}/stat") as file:
                return cls(file.read())
        except (OSError, ValueError, IndexError):
            return None

    @property
    def ended(self) -> bool:
        return self.state in "ZX"


def has_ended(pid: int) -> bool:
    """Whether this process has ended, whether or not its parent has waited for it."""
    found = _Stat.of(pid)
    return not exists(pid) if found is None else found.ended


class BlockedCheck:
    """Whether a process has been waiting for a second, without computing or allocating."""

    def __init__(self) -> None:
        self._since = self._checked = 0.0
        self._then: _Stat | None = None

    def blocked(self, pid: int) -> bool:
        """To be called often."""
        now = time.monotonic()
        if now < self._checked + _STAT_S:
            return False
        self._checked = now
        found, then = _Stat.of(pid), self._then
        if found is None:
            self._then = None
            return False
        if (
            then is None
            or found.state == "R"
            or found.cpu_s - then.cpu_s > _CPU * max(_BLOCKED_S, now - self._since)
            or found.resident > then.resident + _GROWTH
        ):
            self._since, self._then = now, found
            return False
        return now - self._since >= _BLOCKED_S


class Decision(Enum):
    """Whether a worker may continue to load samples."""

    CONTINUE = auto()
    STOP = auto()  # raise MemoryError in the loading thread
    EXIT = auto()  # it was stopped before, and allocates again


class GrowthMonitor:
    """A thread that watches this worker's memory while it loads samples, for as long as ``needed()``.

    ``decide`` is called with the growth in bytes whenever that has risen by 1 MB. A single call that holds the GIL and
    allocates all that is free is not noticed in time.
    """

    def __init__(self, needed: Callable[[], bool], decide: Callable[[int], Decision]) -> None:
        self._needed, self._decide, self._loading = needed, decide, threading.get_ident()
        self._lowest = self._last = _resident()
        self._lock, self._paused = threading.Lock(), False
        start_daemon_thread(self._run, "legroom-growth")

    def pause(self) -> None:
        """Stop nothing from now on; when this returns, an exception that was due has been raised."""
        with self._lock:
            self._paused = True

    def resume(self) -> None:
        """Watch again."""
        self._paused = False

    def _run(self) -> None:
        while self._needed():
            time.sleep(_GROWTH_POLL_S)
            now = _resident()
            self._lowest, self._last = min(self._lowest, now), min(self._last, now)
            if now < self._last + _GROWTH:  # reading the machine's free memory takes a millisecond
                continue
            self._last = now
            with self._lock:
                decision = Decision.CONTINUE if self._paused else self._decide(now - self._lowest)
                if decision is Decision.STOP and not raise_in_thread(self._loading, MemoryError):
                    decision = Decision.EXIT
            if decision is Decision.EXIT:
                os._exit(0)


def raise_in_thread(thread: int, kind: type[BaseException]) -> bool:
    """Raise an exception in another thread at its next bytecode; False where this interpreter cannot."""
    if _set_async_exc is None:
        return False
    return bool(_set_async_exc(ctypes.c_ulong(thread), ctypes.py_object(kind)))


def _resident() -> int:
    """Anonymous memory of this process, including pages that it still shares after a fork; 0 where unknown."""
    try:
        with open("/proc/self/statm", "rb") as file:
            _, resident, shared, *_ = file.read().split()
    except (OSError, ValueError):
        return 0
    return (int(resident) - int(shared)) * mmap.PAGESIZE
