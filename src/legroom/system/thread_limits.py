"""Start threads only where the limits leave room for them: ``ulimit -v``, ``vm.max_map_count``, ``ulimit -u``.

CPython waits forever for a thread that runs out of memory before it has begun, so the limits are checked first.
"""

from __future__ import annotations

import _thread
import atexit
import mmap
import os
import sys
import threading
import time
from collections.abc import Callable

from legroom.messages import say

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PER_THREAD = 72 << 20  # bytes of address space: a malloc arena and a stack
_MAPS_PER_THREAD = 16  # a stack, a malloc arena and their guards, and what Python allocates first
_MAPS_STAND_S = 1.0
_maps_seen: dict[str, float] = {}  # how many more maps there could be, and until when that stands
_MOST_WAIT_AT_EXIT = 2.0  # seconds, for threads that have been started and have not begun
_not_begun: set[object] = set()


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
    held: list[mmap.mmap] = []
    try:
        for number in range(count):
            # Neighbours of different rights do not become one map.
            rights = mmap.PROT_READ | (mmap.PROT_WRITE if number % 2 else 0)
            held.append(mmap.mmap(-1, mmap.PAGESIZE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, rights))
    except (OSError, MemoryError):
        return False
    finally:
        for one in held:
            one.close()
    _maps_seen.update(count=count, until=time.monotonic() + _MAPS_STAND_S)
    return True


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


def start_thread_at_once(target: Callable[..., None], *arguments: object) -> bool:
    """Start a thread that does not keep the program alive, without waiting for it; False where none can be started.

    ``Thread.start`` waits until the new thread has held the interpreter's lock. Python 3.11.2, which Debian 12 has, may
    crash (SIGSEGV) if it exits before a thread has begun, so the exit waits for that.
    """
    token = object()
    _not_begun.add(token)
    try:
        _thread.start_new_thread(_begin, (token, target, arguments))
    except RuntimeError:  # a limit, or the interpreter is exiting
        _not_begun.discard(token)
        return False
    return True


def _begin(token: object, target: Callable[..., None], arguments: tuple[object, ...]) -> None:
    _not_begun.discard(token)
    target(*arguments)


@atexit.register
def _wait_for_threads_to_begin() -> None:
    end = time.monotonic() + _MOST_WAIT_AT_EXIT
    while _not_begun and time.monotonic() < end:
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
