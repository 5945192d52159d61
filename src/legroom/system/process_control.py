"""This process and its children: LEGROOM_DISABLE, usable CPUs, signals, how a child ended, calls of the C library.

legroom.rescue diagnoses why a job ended; here an exit status is only named. legroom.probe.process_and_limits reads the
cgroup's CPU quota, which slows threads down. thread_limits.py starts threads.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from legroom.messages import say
from legroom.system.lazy_and_optional_imports import import_lock

_PR_SET_PDEATHSIG = 1
MAP_FAILED = 2 * sys.maxsize + 1  # (void *) -1


def legroom_disabled(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_DISABLE`` turns the cache and the transport of the DataLoader off."""
    return env.get("LEGROOM_DISABLE", "").strip().lower() not in ("", "0", "no", "false", "off")


def usable_cpus() -> int:
    """The size of the affinity mask, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def lower_thread_priority() -> None:
    """Lower this thread's priority, so that hashing has a core to itself: md5 takes longer than all the rest."""
    if sys.platform == "linux":
        try:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10))
        except OSError:
            pass  # forbidden by a sandbox: only a little slower


def signal_name(number: int) -> str:
    """``SIGBUS``; ``signal 40`` for one that has no name on this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return say("signal {number}", number=number)


@contextmanager
def handling_signals(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle these signals in the block, and as before after it. Does nothing outside the main thread."""
    before = {}
    if threading.current_thread() is threading.main_thread():
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process that signal when its parent ends. Does nothing where that is not Linux."""
    if sys.platform == "linux":
        libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


def prefer_oom_kill() -> None:
    """Ask the kernel's OOM killer to take this process, and its children, before any other."""
    try:
        with open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
            file.write("1000")
    except OSError:
        pass  # not Linux, or a sandbox: the largest is killed, which is most likely this process


@dataclass(frozen=True, slots=True)
class ExitStatus:
    """The wait status of a process."""

    status: int | None = None  # the exit code
    signal: int | None = None  # the signal that killed it

    @classmethod
    def of(cls, returncode: int) -> ExitStatus:
        """From what subprocess and multiprocessing give: a signal is a negative number."""
        return cls(signal=-returncode) if returncode < 0 else cls(returncode)

    @property
    def shell_status(self) -> int:
        """As a shell shows it: the exit code, or 128 + the signal."""
        if self.signal is not None:
            return 128 + self.signal
        return self.status or 0

    def by_signal(self, number: int) -> bool:
        """Whether that signal ended it, as its parent sees it, or as a shell in between reports it."""
        return self.signal == number or self.status == 128 + number

    @property
    def success(self) -> bool:
        """Whether the exit code is 0."""
        return self.signal is None and self.status == 0

    def __str__(self) -> str:
        """For people: ``killed by signal 9 (SIGKILL)``, ``exit code 1``."""
        if self.signal is not None:
            return say("killed by signal {number} ({name})", number=self.signal, name=signal_name(self.signal))
        return say("exit code {status}", status=self.status)


# Calls of the C library that Python does not offer. They run without the interpreter's lock.


@cache
def libc() -> Any:
    """The C library, with the argument types of the calls that take addresses or sizes."""
    with import_lock:
        import ctypes  # takes milliseconds

    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long)
    if sys.platform == "linux":
        library.sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
    library.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
    library.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    return library


def last_error() -> OSError:
    """The error of this thread's last failed call."""
    with import_lock:
        import ctypes

    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))


def malloc_trim() -> None:
    """Return freed memory to the system. The allocator keeps it otherwise, and it counts as used."""
    trim = getattr(libc(), "malloc_trim", None) if sys.platform == "linux" else None  # glibc has it, musl has not
    if trim is not None:
        trim(0)
