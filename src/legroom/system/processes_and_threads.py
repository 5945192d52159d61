"""This process, its children and its threads: usable CPUs, signals, how a child ended, calls of the C library.

A thread is started only where the limits leave room for it: ``ulimit -v``, ``vm.max_map_count``, ``ulimit -u``. CPython
waits forever for a thread that runs out of memory before it has begun. legroom.rescue diagnoses why a job ended; here
an exit status is only named. legroom.probe.process_and_limits reads the cgroup's CPU quota, which slows threads down.
"""

from __future__ import annotations

import _thread
import atexit
import mmap
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from legroom.messages import say
from legroom.system.lazy_and_optional_imports import import_lock

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER, _PR_GET_CHILD_SUBREAPER = 36, 37
MAP_FAILED = 2 * sys.maxsize + 1  # (void *) -1
_PER_THREAD = 72 << 20  # bytes of address space: a malloc arena and a stack
_MAPS_PER_THREAD = 16  # a stack, a malloc arena and their guards, and what Python allocates first
_MAPS_STAND_S = 1.0
_maps_seen: dict[str, float] = {}  # how many more maps there could be, and until when that stands
_MOST_WAIT_AT_EXIT = 2.0  # seconds, for threads that have been started and have not begun
Alive = Callable[[], object]  # whether a thread lives: None once it has ended
_not_begun: set[Alive] = set()


def legroom_disabled(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_DISABLE`` turns the cache and the transport of the DataLoader off."""
    return env.get("LEGROOM_DISABLE", "").strip().lower() not in ("", "0", "no", "false", "off")


def usable_cpus() -> int:
    """The size of the affinity mask, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def signal_name(number: int) -> str:
    """``SIGBUS``; ``signal 40`` for one that has no name on this system."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return say("signal {number}", number=number)


@contextmanager
def handling_signals(numbers: Iterable[int], handler: Callable[[int, Any], None]) -> Iterator[None]:
    """Handle these signals in the block, and as before after it. Does nothing outside the main thread.

    A signal that is ignored stays ignored, here and in processes that are started: nohup and a script's ``&`` ask so.
    """
    before = {}
    if threading.current_thread() is threading.main_thread():
        heeded = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
        before = {number: signal.signal(number, handler) for number in heeded}
    try:
        yield
    finally:
        for number, previous in before.items():
            if previous is not None:  # a handler that C code had installed: Python cannot restore it
                signal.signal(number, previous)


def die_with_parent(number: int) -> None:
    """Ask the kernel to send this process that signal when its parent ends. Does nothing where that is not Linux."""
    if sys.platform == "linux":
        libc().prctl(_PR_SET_PDEATHSIG, int(number), 0, 0, 0)


@contextmanager
def adopting_orphans() -> Iterator[None]:
    """In the block, descendants whose parent ends become children of this process. Elsewhere than on Linux: of init.

    No process that is started inherits this. Who adopts has to wait for the adopted, by their process IDs.
    """
    if sys.platform != "linux":
        yield
        return
    with import_lock:
        import ctypes
    before = ctypes.c_int(0)
    libc().prctl(_PR_GET_CHILD_SUBREAPER, ctypes.byref(before), 0, 0, 0)
    libc().prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        libc().prctl(_PR_SET_CHILD_SUBREAPER, before.value, 0, 0, 0)


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


# Threads.


def room_for_threads(count: int) -> bool:
    """Whether ``ulimit -v`` and ``vm.max_map_count`` leave address space for that many more threads.

    CPython waits forever for a thread that runs out of memory before it has begun.
    """
    return _address_space_left(count) and _maps_left(count * _MAPS_PER_THREAD)


def _maps_left(count: int) -> bool:
    """Whether this process may have that many more memory maps. Counting those that it has takes longer.

    A yes stands for a moment: loops ask before every batch, and a hundred maps take as long as a thread's start.
    """
    if sys.platform != "linux" or (count <= _maps_seen.get("count", 0) and time.monotonic() < _maps_seen["until"]):
        return True
    try:
        with mmap.mmap(-1, count * mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ) as pages:
            split_into_maps(pages, mmap.PAGESIZE)
    except (OSError, MemoryError):
        return False
    _maps_seen.update(count=count, until=time.monotonic() + _MAPS_STAND_S)
    return True


def split_into_maps(pages: mmap.mmap, size: int) -> None:
    """Have the kernel count every ``size`` bytes of an anonymous mapping as a memory map. Raises OSError at its limit.

    It does not join neighbours of different advice, and one call makes two maps more: mapping them singly takes longer.
    """
    if sys.platform == "linux":
        for start in range(0, len(pages), 2 * size):
            pages.madvise(mmap.MADV_RANDOM, start, size)


def _address_space_left(count: int) -> bool:
    if resource is None:
        return True
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY or not os.path.exists("/proc/self/statm"):
        return True
    try:
        with open("/proc/self/statm", "rb") as statm:
            used = int(statm.read().split()[0]) * resource.getpagesize()
    except OSError:  # no free descriptor: without a thread the program is slower, and does not hang
        return False
    return limit - used >= count * _PER_THREAD


def start_daemon_thread(target: Callable[[], None], name: str) -> threading.Thread | None:
    """Start a thread that does not keep the program alive; None where none can be started (`why_no_thread`)."""
    if not room_for_threads(1):
        return None
    thread = threading.Thread(target=target, name=name, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # a limit on processes
        return None
    return thread


class _Token:
    """Alive as long as a thread is, which has it among its arguments."""

    __slots__ = ("__weakref__",)


def start_thread_at_once(target: Callable[..., None], *arguments: object) -> Alive | None:
    """Start a thread that does not keep the program alive, without waiting for it; None where none can be started.

    The result is called for whether the thread lives: it returns None once that has ended, also if it could not begin
    for want of memory.

    ``Thread.start`` waits until the new thread has held the interpreter's lock. Python 3.11.2, which Debian 12 has, may
    crash (SIGSEGV) if it exits before a thread has begun, so the exit waits for that.
    """
    for alive in set(_not_begun):
        if alive() is None:
            _not_begun.discard(alive)
    token = _Token()
    alive = weakref.ref(token)
    _not_begun.add(alive)
    try:
        _thread.start_new_thread(_begin, (token, alive, target, arguments))
    except RuntimeError:  # a limit, or the interpreter is exiting
        _not_begun.discard(alive)
        return None
    return alive


def _begin(token: _Token, alive: Alive, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    _not_begun.discard(alive)
    target(*arguments)


@atexit.register
def _wait_for_threads_to_begin() -> None:
    end = time.monotonic() + _MOST_WAIT_AT_EXIT
    while any(alive() is not None for alive in set(_not_begun)) and time.monotonic() < end:
        time.sleep(0.0005)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_not_begun.clear)  # the child has none of these threads


def why_no_thread(count: int = 1) -> str:
    """Why that many threads cannot be started now."""
    if not _address_space_left(count):
        return say("ulimit -v leaves no address space for another thread")
    if not _maps_left(count * _MAPS_PER_THREAD):
        return say("the limit on memory maps is reached (vm.max_map_count)")
    return say("the limit on processes and threads is reached (ulimit -u, pids.max)")


def lower_thread_priority() -> None:
    """Lower this thread's priority, so that hashing has a core to itself: md5 takes longer than all the rest."""
    if sys.platform == "linux":
        try:
            thread = threading.get_native_id()
            os.setpriority(os.PRIO_PROCESS, thread, min(19, os.getpriority(os.PRIO_PROCESS, thread) + 10))
        except OSError:
            pass  # forbidden by a sandbox: only a little slower


# Calls of the C library that Python does not offer. They run without the interpreter's lock.


@cache
def libc() -> Any:
    """The C library, with the argument types of the calls that take addresses or sizes."""
    with import_lock:
        import ctypes  # takes milliseconds

    library = ctypes.CDLL(None, use_errno=True)
    library.mmap.restype = ctypes.c_void_p
    library.mmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t, *([ctypes.c_int] * 3), ctypes.c_long)
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


def release_freed_memory() -> None:
    """The same for Arrow's allocator too."""
    malloc_trim()
    arrow = sys.modules.get("pyarrow")
    if arrow is not None:
        arrow.default_memory_pool().release_unused()
