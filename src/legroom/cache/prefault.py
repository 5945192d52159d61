"""Pages brought in ahead of their first use, in the background.

Covers: filling the page tables of maps, waiting for it. Does not cover: reading ahead from a disk on purpose;
the kernel does that while pages are filled.

In memory, a byte of every 64 kB is read and then one of every page: the kernel maps the pages around a fault along
with it, so the first pass brings nearly all and the second finds the rest. That takes two thirds of the time of
MADV_POPULATE_READ, which walks page by page (16 ms against 23 for 368 MB on the machine of bench/results). From a
disk, where a touch would wait for each read in turn, the kernel is asked; ``mmap.madvise`` holds the interpreter's
lock, so through ctypes. Kernels before 5.14 do not know the call: their pages are touched too. All in steps, with a
look at each whether the map is still there.
"""

from __future__ import annotations

import _thread
import ctypes
import errno
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence

from legroom.cache.maps import Map
from legroom.system.cpus import usable_cpus
from legroom.system.imports import import_lock
from legroom.system.libc import libc

_POPULATE_READ = 22
_STEP = 64 << 20
_PAGE = 4096
_AROUND = 65536  # what a fault brings along, unless somebody has changed fault_around_bytes
_MOST_THREADS = 4  # one is left for whoever reads the data meanwhile
_HEAD_START = 0.0005  # the caller has its arrays, and perhaps a first row, before pages are filled


class Prefault:
    """A running pre-fault; it ends early when the maps go away."""

    def __init__(self, maps: Sequence[Map], *, in_memory: bool) -> None:
        self._maps = [weakref.ref(item) for item in maps]
        self._in_memory = in_memory
        self._start()

    def _start(self) -> None:
        self._pid = os.getpid()
        self._done = threading.Event()
        self._lock = threading.Lock()
        self._steps: Iterator[tuple[weakref.ref[Map], int]] = iter(())
        self._running = 1
        self.filled = 0
        self._spawn(self._first)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until every page is there; False where that took longer than ``timeout``."""
        if self._pid != os.getpid():  # a forked child has the maps and not the threads
            self._start()
        return self._done.wait(timeout)

    def _spawn(self, work: Callable[[], None]) -> None:
        # Not threading.Thread: its start() waits until the new thread has had the interpreter's lock.
        try:
            _thread.start_new_thread(work, ())
        except RuntimeError:  # the interpreter is ending, or no thread is to be had: pages come when used
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
                    del item  # the map may go between two steps
        finally:
            self._end()

    def _next(self) -> tuple[weakref.ref[Map], int] | None:
        with self._lock:
            return next(self._steps, None)

    def _end(self) -> None:
        with self._lock:
            self._running -= 1
            if self._running == 0:
                self._done.set()


def _populate(item: Map, offset: int, length: int) -> None:
    if (
        libc().madvise(item.address + offset, length, _POPULATE_READ) != 0
        and ctypes.get_errno() == errno.EINVAL
    ):
        _touch(item, offset, length, _PAGE)  # any other error: pages will come when they are used


def _fits(size: int) -> bool:
    """Whether a disk entry is small enough that filling it evicts nothing that is needed."""
    with import_lock:
        from legroom.cache.room import memory_bounds

    return all(bound.free >= size for bound in memory_bounds())


def _touch(item: Map, offset: int, length: int, step: int) -> None:
    """Read a byte of every ``step``; numpy lets other threads run meanwhile."""
    import numpy as np

    bytes_there = np.frombuffer(item.buffer(), np.uint8, length, offset)[::step]
    int(bytes_there.max(initial=0))  # read, and nothing made of it
