"""What the CUDA gatherers share: a side stream that prefetches one batch, row layout, resources kept per process.

Ownership: the memory of a batch comes from torch's allocator on the side stream. When a batch is handed over, the
consumer's stream waits until it is complete, and the allocator records that the consumer's stream uses the memory. So
a batch that is dropped while the GPU still works on it is not overwritten. Its memory is free when the GPU is done,
which may be many steps after the CPU; ``STEPS_AHEAD`` limits how far the CPU runs ahead, and so the memory.
"""

from __future__ import annotations

import os
import sys
import threading
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np

from legroom.errors import UnsupportedData, UsageError
from legroom.loader.batches.cuda_driver import Driver, cannot_use_cuda
from legroom.words import say

if TYPE_CHECKING:
    import torch


NDArray = np.ndarray[Any, Any]
STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class QueuedBatch:
    """A batch that the side stream will have made when ``done`` has come."""

    tensors: Mapping[str, torch.Tensor]
    done: Any


class SideStream:
    """One side stream of a device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()
        self._handed: deque[Any] = deque()

    def wait_for_room(self) -> None:
        """Wait until the consumer's stream is at most so many batches behind; at once where it is."""
        while len(self._handed) > STEPS_AHEAD:
            self._handed.popleft().synchronize()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """This thread's work goes to the side stream.

        Tensors made here are ordinary ones: a batch begun under ``inference_mode`` may be trained on.
        """
        import torch

        with torch.inference_mode(False), self.driver.on(self.stream):
            yield

    def queued(self, tensors: Mapping[str, torch.Tensor]) -> QueuedBatch:
        """What has just been queued, and the event behind it."""
        return QueuedBatch(tensors, self.driver.mark(self.stream))

    def hand_over(self, batch: QueuedBatch) -> dict[str, torch.Tensor]:
        """The batch, usable on this thread's current stream; nobody waits but that stream."""
        consumer = self.driver.current()
        consumer.wait_event(batch.done)
        for tensor in batch.tensors.values():
            self.driver.lend(tensor, consumer)
        self._handed.append(self.driver.mark(consumer, sleep=True))
        return dict(batch.tensors)

    def drain(self) -> None:
        """Wait until everything queued here is done."""
        self._handed.clear()
        self.stream.synchronize()


class CudaGatherer(ABC):
    """What the CUDA gatherers share: one batch ahead, closing, and what a forked child may not do."""

    path: str
    why: str

    def __init__(self, driver: Driver, path: str, why: str) -> None:
        self.path, self.why = path, why
        self.lane = SideStream(driver)
        self._ahead: tuple[NDArray, Callable[[], QueuedBatch]] | None = None
        self._pid = os.getpid()
        self._open = True

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows, ordered on the current stream; begun already where ``begin`` was told so."""
        self._usable()
        ahead, self._ahead = self._ahead, None
        ready = ahead[1] if ahead is not None and ahead[0] is rows else self._start(rows)
        return self.lane.hand_over(ready())

    def begin(self, rows: NDArray) -> None:
        """Start on the batch that will be asked for next: the GPU makes it while it computes on this one."""
        self._usable()
        self._ahead = rows, self._start(rows)

    def close(self) -> None:
        """Wait for what is queued, let go of everything; batches that were given stay valid."""
        if not self._open or self._pid != os.getpid():
            return
        self._open = False
        self._ahead = None
        self._stop()
        self.lane.drain()
        self._release()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # Streams may be gone at exit, and the kernel takes everything back.
        if not at_exit() and getattr(self, "_open", False):
            self.close()

    def _usable(self) -> None:
        if self._pid != os.getpid():
            raise cannot_use_cuda(say("it was forked from process {pid}, which uses CUDA", pid=self._pid))
        if not self._open:
            raise UsageError(
                say("the batches are closed"), why=say("close() was called"), fix=(say("make them again"),)
            )

    @abstractmethod
    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        """Start on a batch; what is returned gives it, and waits for it where it must."""

    def _stop(self) -> None:
        """End threads of one's own, before the stream is waited for."""
        return

    @abstractmethod
    def _release(self) -> None:
        """Let go of memory; nothing is queued any more."""


_WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """The rows of one column."""

    count: int
    shape: tuple[int, ...]  # of one row
    nbytes: int  # of one row
    dtype: torch.dtype

    def width(self, address: int) -> int:
        """The widest integer that divides a row and the place where the first one lies."""
        return next(width for width in _WIDTHS if self.nbytes % width == 0 and address % width == 0)

    def words(self, array: NDArray) -> NDArray:
        """The column, which is contiguous, as rows of integers; nothing is copied."""
        width = self.width(array.ctypes.data)
        kind = np.dtype(f"i{width}" if width > 1 else "u1")
        return array.reshape(-1).view(kind).reshape(self.count, self.nbytes // width)

    def restore(self, words: torch.Tensor) -> torch.Tensor:
        """Gathered rows of integers as what they are; nothing is copied."""
        return words.view(self.dtype).view(len(words), *self.shape)

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Room for some rows."""
        import torch

        return torch.empty((count, *self.shape), dtype=self.dtype, device=device)


def row_layout(name: str, column: NDArray) -> RowLayout:
    """How the rows of a column are moved; UnsupportedData where torch has no such type."""
    import torch

    shape = column.shape[1:]
    try:
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    except (TypeError, ValueError) as problem:
        raise UnsupportedData(
            say("{name} cannot be on a CUDA device", name=name),
            why=say("torch {version} has no type for {dtype}", version=torch.__version__, dtype=column.dtype),
            fix=(say("leave it out: keys=(…)"), say("format='numpy' gives it as it is")),
        ) from problem
    return RowLayout(len(column), shape, prod(shape) * column.dtype.itemsize, dtype)


T = TypeVar("T")


@dataclass(slots=True)
class _Resource:
    thing: Any
    drop: Callable[[Any], None]
    pid: int = field(default_factory=os.getpid)
    users: int = 0
    arrays: set[int] = field(default_factory=set)
    dropped: bool = False


class ResourceUse(Generic[T]):
    """Somebody's hold on a thing; letting go twice is letting go once."""

    __slots__ = ("_let_go", "thing")

    def __init__(self, thing: T, let_go: Callable[[], None]) -> None:
        self.thing = thing
        self._let_go: Callable[[], None] | None = let_go

    def release(self) -> None:
        let_go, self._let_go = self._let_go, None
        if let_go is not None:
            let_go()


class ResourceCache:
    """The things of this process, by key."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, _Resource] = {}
        # Arrays may die, and finalizers run, wherever this thread is: also inside the lock.
        self._lock = threading.RLock()

    def use(
        self, key: Hashable, array: Any, make: Callable[[], T], drop: Callable[[T], None]
    ) -> ResourceUse[T]:
        """The thing of that key, made where it is not there yet."""
        with self._lock:
            while True:
                kept = self._kept.get(key)
                if kept is None or kept.pid != os.getpid():  # what a parent made is the parent's
                    kept = self._kept[key] = _Resource(make(), drop)
                kept.users += 1
                if not kept.dropped:  # else a finalizer ran between the lines above
                    break
            if id(array) not in kept.arrays:
                kept.arrays.add(id(array))
                weakref.finalize(array, self._died, key, kept, id(array)).atexit = False
            thing: T = kept.thing
        return ResourceUse(thing, partial(self._leave, key, kept))

    def __contains__(self, key: Hashable) -> bool:
        kept = self._kept.get(key)
        return kept is not None and kept.pid == os.getpid()

    def __len__(self) -> int:
        return len(self._kept)

    def _leave(self, key: Hashable, kept: _Resource) -> None:
        with self._lock:
            kept.users -= 1
            self._drop_if_idle(key, kept)

    def _died(self, key: Hashable, kept: _Resource, array: int) -> None:
        with self._lock:
            kept.arrays.discard(array)
            self._drop_if_idle(key, kept)

    def _drop_if_idle(self, key: Hashable, kept: _Resource) -> None:
        if kept.users == 0 and not kept.arrays and not kept.dropped and kept.pid == os.getpid():
            kept.dropped = True
            del self._kept[key]
            kept.drop(kept.thing)


RESOURCES = ResourceCache()
