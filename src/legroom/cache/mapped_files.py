"""Map files copy-on-write, and prefault their pages in the background.

Mappings are private and writable: a trainer that writes in place changes its own pages only. They reserve no memory,
otherwise 40 GB could not be mapped on a 24 GB machine. Under ``vm.overcommit_memory=2`` the kernel would charge every
writable mapping in full, so they are read-only there. No descriptor stays open: thousands of arrays would use them up.

A MappedFile owns its addresses. Arrays keep it alive, and it keeps the lease alive. When the last array is freed the
pages are unmapped and the lease is released, in this process alone.

Prefault in memory reads one byte of every 64 kB, then one of every page. The kernel maps the pages around a fault with
it, so the first pass maps nearly all and the second the rest. That takes two thirds of the time of
MADV_POPULATE_READ, which walks page by page (16 ms against 23 for 368 MB on the machine of bench/results). On a disk,
where each touch would wait for a read, MADV_POPULATE_READ is used, through ctypes because ``mmap.madvise`` holds the
interpreter's lock. Kernels before 5.14 do not have it: their pages are touched too.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import mmap
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from legroom.system.cpus import usable_cpus
from legroom.system.imports import import_lock
from legroom.system.libc import MAP_FAILED, last_error, libc

HUGE_PAGE = 2 << 20  # bytes of a huge page on x86 and arm64, and the alignment of its address
_NORESERVE = {"linux": 0x4000}.get(sys.platform, 0)
_NO_ACCESS = 0  # PROT_NONE


@cache
def maps_writable() -> bool:
    """Whether private writable mappings are free of charge on this kernel."""
    try:
        return Path("/proc/sys/vm/overcommit_memory").read_text().strip() != "2"
    except OSError:
        return True


class _Pages:
    """Mapped addresses, unmapped when this object is freed."""

    __slots__ = ("_unmap", "address", "keep", "length")

    def __init__(self, address: int, length: int, keep: object) -> None:
        self.address, self.length, self.keep = address, length, keep
        self._unmap = libc().munmap

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # At exit other threads may still read. The kernel unmaps it.
        if not at_exit():
            self._unmap(self.address, self.length)


class MappedFile:
    """One mapped file. ``keep`` is kept alive as long as the mapping.

    It has no finalizer of its own, on purpose. A weak reference to an object with one can still be followed while the
    finalizer runs, and a background thread would read pages that are being unmapped. Without one, a weak reference
    gives either nothing or a mapping that stays.
    """

    __slots__ = ("__weakref__", "_pages", "writable")

    def __init__(self, fd: int, length: int, keep: object = None, *, offset: int = 0) -> None:
        self.writable = maps_writable()
        protection = mmap.PROT_READ | (mmap.PROT_WRITE if self.writable else 0)
        wish = _aligned_address(length, offset)
        address = libc().mmap(wish, length, protection, mmap.MAP_PRIVATE | _NORESERVE, fd, offset)
        if address == MAP_FAILED:
            raise last_error()
        self._pages = _Pages(address, length, keep)

    @property
    def address(self) -> int:
        """Its first address."""
        return self._pages.address

    @property
    def length(self) -> int:
        """Its length in bytes."""
        return self._pages.length

    @property
    def keep(self) -> object:
        """The object that is kept alive with it."""
        return self._pages.keep

    def buffer(self) -> Any:
        """The bytes, as an object that keeps this mapping alive."""
        buffer: Any = (ctypes.c_char * self.length).from_address(self.address)
        buffer.map = self
        return buffer


def _aligned_address(length: int, offset: int) -> int | None:
    """A free address at which the file's huge pages can be mapped as such. The kernel alone would choose any.

    Another thread may map something there first. Then the kernel chooses.
    """
    if length < HUGE_PAGE or sys.platform != "linux":
        return None
    span = length + HUGE_PAGE
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NORESERVE
    free = libc().mmap(None, span, _NO_ACCESS, private, -1, 0)
    if free == MAP_FAILED:
        return None
    libc().munmap(free, span)
    return int(free) + (offset - int(free)) % HUGE_PAGE


_POPULATE_READ = 22
_STEP = 64 << 20
_PAGE = 4096
_AROUND = 65536  # the kernel's default fault_around_bytes
_MOST_THREADS = 4  # one CPU is left for the training run
_HEAD_START = 0.0005  # the caller gets its arrays before prefaulting starts


class Prefault:
    """A running prefault. It ends early when the mappings are freed."""

    def __init__(self, maps: Sequence[MappedFile], *, in_memory: bool) -> None:
        self._maps = [weakref.ref(item) for item in maps]
        self._in_memory = in_memory
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._steps: Iterator[tuple[weakref.ref[MappedFile], int]] = iter(())
        self._running = 1
        self.filled = 0
        self._spawn(self._first)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every page is mapped. False after ``timeout`` seconds."""
        if self._pid != os.getpid():  # a forked child has the mappings but not the threads
            self._start()
        return self._done.wait(timeout)

    def _spawn(self, work: Callable[[], None]) -> None:
        # Not threading.Thread: its start() waits until the new thread has held the interpreter's lock.
        try:
            _thread.start_new_thread(work, ())
        except (
            RuntimeError
        ):  # the interpreter is exiting, or no thread can be started: pages are mapped on use
            self._end()

    def _first(self) -> None:
        time.sleep(_HEAD_START)
        sizes = [(reference, item.length) for reference in self._maps if (item := reference()) is not None]
        total = sum(size for _, size in sizes)
        if not self._in_memory and not _fits(total):
            self._end()
            return
        self._steps = ((reference, offset) for reference, size in sizes for offset in range(0, size, _STEP))
        helpers = min(_MOST_THREADS, usable_cpus() - 1, total // _STEP) - 1
        for _ in range(helpers):
            with self._lock:
                self._running += 1
            self._spawn(self._fill)
        self._fill()

    def _fill(self) -> None:
        try:
            while (step := self._next()) is not None:
                reference, offset = step
                item = reference()
                if item is not None:
                    length = min(_STEP, item.length - offset)
                    if self._in_memory:
                        _touch(item, offset, length, _AROUND)
                        if length > _PAGE:
                            _touch(item, offset, length, _PAGE)
                    else:
                        _populate(item, offset, length)
                    self.filled += length
                    del item  # the mapping may be freed between two steps
        finally:
            self._end()

    def _next(self) -> tuple[weakref.ref[MappedFile], int] | None:
        with self._lock:
            return next(self._steps, None)

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._done.set()


def _populate(item: MappedFile, offset: int, length: int) -> None:
    if (
        libc().madvise(item.address + offset, length, _POPULATE_READ) != 0
        and ctypes.get_errno() == errno.EINVAL
    ):
        _touch(item, offset, length, _PAGE)  # on any other error pages are mapped on use


def _fits(size: int) -> bool:
    """Whether a disk entry is small enough to prefault without evicting pages that are in use."""
    with import_lock:
        from legroom.cache.capacity import memory_bounds

    return all(bound.free >= size for bound in memory_bounds())


def _touch(item: MappedFile, offset: int, length: int, step: int) -> None:
    """Read one byte of every ``step``. numpy releases the interpreter's lock meanwhile."""
    import numpy as np

    bytes_there = np.frombuffer(item.buffer(), np.uint8, length, offset)[::step]
    int(bytes_there.max(initial=0))  # only to read the pages
