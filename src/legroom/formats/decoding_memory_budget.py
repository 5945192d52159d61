"""The memory that decoding may take at once: a thread waits until a chunk fits beside those of the other threads.

Memory for decoding is reserved before it is taken, and shared by the threads of one load. Inside a memory cgroup the
kernel does not refuse pages, it kills the process. So a decoder reserves the bytes it is about to take. If they do not
fit next to those of other threads it waits, which leaves fewer threads at work. If there is nothing to wait for, the
load is refused with the figures. Each format computes its own need; cache measures what is free.

glibc keeps what a thread has freed for that thread (an arena), tens of megabytes each, and other threads cannot use it.
So the most that each thread has taken counts until freed memory is returned to the system, which happens before a
thread waits or is refused. Fewer arenas (mallopt) would be a setting of the whole program.
"""

from __future__ import annotations

import mmap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

import numpy as np

from legroom.errors import NoRoom
from legroom.messages import say
from legroom.system.processes_and_threads import release_freed_memory
from legroom.units import format_size

_LARGE = 16 << 20  # bytes: free memory is measured again before that much is taken
_STALE = 0.1  # seconds after which a measurement is repeated
# The most that glibc keeps of one thread's freed memory; larger blocks are returned at once.
_KEPT = 64 << 20


@dataclass(frozen=True, slots=True)
class Allowed:
    """How many bytes of memory may be taken now, what limits them, and how to get more."""

    nbytes: int
    why: str
    fix: tuple[str, ...] = ()


@dataclass(slots=True, eq=False)
class DecodingMemory:
    """The memory of one load; ``measure`` returns what is free now (None: no limit)."""

    measure: Callable[[], Allowed] | None = None
    write_through: bool = False  # what is written does not fit beside it: each page must reach the disk at once
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _in_use: int = 0  # taken by threads that give it back without waiting for others
    _kept: dict[int, int] = field(default_factory=dict)  # per thread: bytes freed that its arena may still hold
    _limit: Allowed | None = None  # for everything in use
    _measured: float = 0.0

    @contextmanager
    def take(self, nbytes: int, what: str) -> Iterator[None]:
        """Reserve that many bytes until the block ends; NoRoom if they never fit. Must not be nested."""
        with self.take_some(nbytes, 1, what):
            yield

    @contextmanager
    def take_some(self, each: int, most: int, what: str) -> Iterator[int]:
        """Reserve ``each`` bytes as many times as fit, from 1 to ``most``, until the block ends; yields the count."""
        if self.measure is None or each <= 0:
            yield most
            return
        count = self._wait(each, most, what)
        try:
            yield count
        finally:
            with self._changed:
                self._in_use -= count * each
                thread = threading.get_ident()
                self._kept[thread] = max(self._kept.get(thread, 0), min(_KEPT, count * each))
                self._changed.notify_all()

    def require(self, nbytes: int, what: str) -> None:
        """Raise NoRoom if that many bytes do not fit now."""
        with self.take(nbytes, what):
            pass

    def array(self, shape: tuple[int, ...], dtype: np.dtype[Any], what: str) -> np.ndarray[Any, Any]:
        """A new array that outlives this reservation; its pages are allocated before it is returned."""
        nbytes = prod(shape) * dtype.itemsize
        with self.take(nbytes, what):
            made: np.ndarray[Any, Any] = np.empty(shape, dtype)
            made.reshape(-1).view(np.uint8)[:: mmap.PAGESIZE] = 0
            with self._changed:
                if self._limit is not None:
                    self._limit = replace(self._limit, nbytes=self._limit.nbytes - nbytes)
        return made

    def _wait(self, each: int, most: int, what: str) -> int:
        with self._changed:
            while True:
                count = min(most, self._available(each) // each)
                if count < 1 and (self._kept or not self._in_use):
                    release_freed_memory()
                    self._kept.clear()
                    self._limit = self._limit if self._in_use else None
                    count = min(most, self._available(each) // each)
                    if count < 1 and not self._in_use:
                        raise self._refused(each, what)
                if count >= 1:
                    self._in_use += count * each
                    self._kept.pop(threading.get_ident(), None)  # it reuses that memory
                    return count
                self._changed.wait()

    def _available(self, wanted: int) -> int:
        """Bytes that may be taken besides those in use; negative if more is in use than allowed."""
        assert self.measure is not None
        now = time.monotonic()
        found: Allowed | None = None
        if self._limit is None or wanted >= _LARGE or now - self._measured > _STALE:
            found = self.measure()
            self._measured = now
            if self._limit is None or not self._in_use:
                self._limit = found
                self._kept.clear()  # the measurement already excludes it
        others = sum(self._kept.values()) - self._kept.get(threading.get_ident(), 0)
        free = self._limit.nbytes - self._in_use - others
        # Other processes may have taken what was free before.
        return free if found is None else min(found.nbytes, free)

    def _refused(self, nbytes: int, what: str) -> NoRoom:
        limit = self._limit
        assert limit is not None
        return NoRoom(
            say(
                "not enough memory to decode {what}: {missing} more needed",
                missing=format_size(max(1, nbytes - max(0, limit.nbytes))),
                what=what,
            ),
            why=say("decoding needs {need} at once; {why}", need=format_size(nbytes), why=limit.why),
            fix=(
                *limit.fix,
                say("write the file with smaller chunks, batches or pages"),
                say("load only what you need: keys=[…]"),
            ),
        )


UNLIMITED = DecodingMemory()
