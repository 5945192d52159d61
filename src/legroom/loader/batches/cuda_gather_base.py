"""What the CUDA gatherers share: a side stream that prefetches one batch, row layout, resources kept per process.

Ownership: the memory of a batch comes from torch's allocator on the consumer's stream, as that of any tensor of the
training step. Before the side stream writes to it, it waits for what the consumer had queued until then, because a
dropped tensor's memory is reused at once. The consumer's stream waits until the batch is complete when it is handed
over. So a batch that is dropped while the GPU still works on it is not overwritten, and however far the CPU runs ahead
of the GPU, no more memory is in use than batches exist. A batch that is never handed over keeps its memory until the
side stream is done with it.

The calls of one batch take the training thread 30 microseconds. A training step that is bound by launching kernels
slows down by each of them.
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
from legroom.loader.batches.cpu_gather import torch_dtype
from legroom.loader.batches.cuda_calls_for_gather import Driver, cannot_use_cuda
from legroom.messages import say

if TYPE_CHECKING:
    import torch


NDArray = np.ndarray[Any, Any]
_MOST_ORDER = 1 << 27  # bytes of an order that is kept in GPU memory


class SideStream:
    """One side stream of a device."""

    def __init__(self, driver: Driver) -> None:
        self.driver = driver
        self.stream = driver.stream()

    @contextmanager
    def queueing(self) -> Iterator[None]:
        """A context in which this thread's work goes to the side stream, outside of ``inference_mode``."""
        import torch

        with torch.inference_mode(False), self.driver.on(self.stream):
            yield


class QueuedBatch:
    """A batch that the side stream fills.

    Made in the consumer's thread. ``before`` and ``queued`` enclose the work of the thread that queues it.
    """

    __slots__ = ("_consumer", "_done", "_free", "_side", "tensors")

    def __init__(self, side: SideStream, rows: Mapping[str, RowLayout], count: int) -> None:
        driver = side.driver
        self.tensors: dict[str, torch.Tensor] = {}
        self._side, self._consumer, self._done = side, driver.current(), None
        self.tensors = {name: kind.empty(count, driver.device) for name, kind in rows.items()}
        self._free = driver.mark(self._consumer)

    def before(self) -> None:
        """Let the side stream wait until the memory is free."""
        self._side.stream.wait_event(self._free)

    def queued(self) -> QueuedBatch:
        """All work of this batch is queued on the side stream."""
        self._done = self._side.driver.mark(self._side.stream)
        return self

    @property
    def done(self) -> Any:
        """The event after which the batch is complete."""
        return self._done

    def hand_over(self) -> dict[str, torch.Tensor]:
        """The tensors, usable on this thread's current stream; only that stream waits."""
        driver = self._side.driver
        consumer = driver.current()
        consumer.wait_event(self._done)
        if consumer.cuda_stream != self._consumer.cuda_stream:  # another one than when the batch was begun
            for tensor in self.tensors.values():
                driver.record_use(tensor, consumer)
        tensors, self.tensors = self.tensors, {}
        return tensors

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # It was not handed over: the loop was left, or an exception came. The side stream may still write to it.
        if self.tensors and not at_exit():
            for tensor in self.tensors.values():
                self._side.driver.record_use(tensor, self._side.stream)


class _SentOrder:
    """An order in host memory and its copy in GPU memory."""

    __slots__ = ("_address", "_start", "_streams", "_there", "host", "tensor")

    def __init__(self, driver: Driver, host: NDArray, *, several_streams: bool) -> None:
        self.host, self.tensor = host, driver.row_numbers(host.view(np.int64))
        self._start, self._address = host.ctypes.data, self.tensor.data_ptr()
        self._there: Any = None  # the event after which the order is in GPU memory
        self._streams: set[int] | None = None  # that wait for it; None: it is used on the stream that sent it
        if several_streams:
            current = driver.current()
            self._there, self._streams = driver.mark(current), {current.cuda_stream}

    def address(self, rows: NDArray) -> int:
        """Where these row numbers of it are in GPU memory."""
        return self._address + rows.ctypes.data - self._start

    def view(self, rows: NDArray) -> torch.Tensor:
        """These row numbers of it, in GPU memory."""
        first = (rows.ctypes.data - self._start) // 8
        return self.tensor[first : first + len(rows)]

    def use_on_current_stream(self, driver: Driver) -> None:
        """Let the current stream wait for it, once, and keep its memory until that stream has read it."""
        if self._streams is None:
            return
        current = driver.current()
        if current.cuda_stream not in self._streams:
            current.wait_event(self._there)
            driver.record_use(self.tensor, current)
            self._streams.add(current.cuda_stream)  # last: an interruption before it only means waiting twice


class EpochOrder:
    """Row numbers in GPU memory. The order of an epoch is sent whole with its first batch; batches get views of it.

    The order is used on the stream that was current when it was sent, and with ``several_streams`` on others too. Each
    of these waits for the order once, and its memory is not reused before all of them have read it. What is known of
    the order is one object: after an interruption it is that of one order, or of the one before.
    """

    def __init__(self, driver: Driver, *, several_streams: bool = False) -> None:
        self._driver, self._several_streams = driver, several_streams
        self._sent: _SentOrder | None = None

    def on_device(self, rows: NDArray) -> torch.Tensor:
        """The row numbers, usable on the current stream."""
        whole = rows.base
        if not isinstance(whole, np.ndarray) or not _is_order(whole) or not _is_order(rows):
            return self._driver.row_numbers(rows)
        sent = self._sent
        if sent is None or sent.host is not whole:
            sent = self._sent = _SentOrder(self._driver, whole, several_streams=self._several_streams)
        sent.use_on_current_stream(self._driver)
        return sent.view(rows)

    def address(self, rows: NDArray) -> int | None:
        """Where the row numbers are in GPU memory, if they were sent before. This takes a tenth of ``on_device``."""
        sent = self._sent
        if sent is None or sent.host is not rows.base or not _is_order(rows):
            return None
        sent.use_on_current_stream(self._driver)
        return sent.address(rows)

    def drop(self) -> None:
        """Free the order in GPU memory."""
        self._sent = None


def _is_order(rows: NDArray) -> bool:
    """Whether the array is row numbers that nothing can change, so that a copy in GPU memory stays right."""
    flags = rows.flags
    return (
        (rows.ndim, rows.itemsize) == (1, 8)
        and flags.c_contiguous
        and not flags.writeable
        and rows.nbytes <= _MOST_ORDER
    )


class OwnedHere(ABC):
    """Base of what uses CUDA: closing, also by the garbage collector, and refusal in a forked child."""

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._open = True

    def require_usable(self) -> None:
        """Refuse to gather in a fork of the process that opened this, and after ``close``."""
        if self._pid != os.getpid():
            raise cannot_use_cuda(say("it was forked from process {pid}, which uses CUDA", pid=self._pid))
        if not self._open:
            raise UsageError(
                say("the batches are closed"), why=say("close() was called"), fix=(say("call data.batches(…) again"),)
            )

    def close(self) -> None:
        """Wait for queued work and release everything; returned batches stay valid."""
        if self._open and self._pid == os.getpid():
            self._open = False
            self._close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        # Streams may be gone at exit, and the kernel releases everything.
        if not at_exit() and getattr(self, "_open", False):
            self.close()

    @abstractmethod
    def _close(self) -> None: ...


class CudaGatherer(OwnedHere):
    """Base of the CUDA gatherers with a side stream: prefetch of one batch."""

    path: str
    why: str
    ahead = 1  # batches that may be begun before the one that is gathered next

    def __init__(self, driver: Driver, path: str, why: str) -> None:
        self.path, self.why = path, why
        self.side = SideStream(driver)
        self._begun: deque[tuple[NDArray, Callable[[], QueuedBatch]]] = deque()
        super().__init__()

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows, ordered on the current stream; prefetched where ``begin`` had these rows."""
        self.require_usable()
        ready = self._prefetched(rows) or self._start(rows)
        return ready().hand_over()

    def begin(self, rows: NDArray) -> None:
        """Prefetch a batch: it is gathered while the GPU computes on the current one."""
        self.require_usable()
        while len(self._begun) >= self.ahead:  # of a loop that was left
            self._begun.popleft()
        self._begun.append((rows, self._start(rows)))

    def _prefetched(self, rows: NDArray) -> Callable[[], QueuedBatch] | None:
        """The batch of these rows, if it was begun. Those begun before it are of a loop that was left."""
        if any(begun is rows for begun, _ in self._begun):
            while True:
                begun, ready = self._begun.popleft()
                if begun is rows:
                    return ready
        return None

    def _close(self) -> None:
        self._begun.clear()
        self._stop()
        self.side.stream.synchronize()
        self._release()

    @abstractmethod
    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        """Start a batch; the returned function waits for it, where necessary, and returns it."""

    def _stop(self) -> None:
        """Stop threads, before the stream is waited for."""
        return

    @abstractmethod
    def _release(self) -> None:
        """Release memory; no work is queued any more."""


_INTEGER_BYTES = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class RowLayout:
    """How the rows of one column are moved: as the widest integers that divide a row.

    Rows of 8-byte integers cross PCIe at full speed; rows with an odd number of bytes are moved byte by byte, which is
    slower.
    """

    count: int
    shape: tuple[int, ...]  # of one row
    nbytes: int  # of one row
    dtype: torch.dtype

    def width(self, address: int) -> int:
        """Bytes of the widest integer that divides a row and the address of the first row."""
        return next(width for width in _INTEGER_BYTES if self.nbytes % width == 0 and address % width == 0)

    def words(self, array: NDArray) -> NDArray:
        """The contiguous column as rows of integers; nothing is copied."""
        width = self.width(array.ctypes.data)
        kind = np.dtype(f"i{width}" if width > 1 else "u1")
        return array.reshape(-1).view(kind).reshape(self.count, self.nbytes // width)

    def restore(self, words: torch.Tensor) -> torch.Tensor:
        """Gathered rows of integers in the column's dtype and shape; nothing is copied."""
        return words.view(self.dtype).view(len(words), *self.shape)

    def as_words(self, rows: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The reverse: contiguous rows as rows of integers of this dtype; nothing is copied."""
        return rows.view(-1).view(dtype).view(len(rows), self.nbytes // dtype.itemsize)

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """An empty tensor for ``count`` rows. It can be trained on, also if it is made under ``inference_mode``."""
        import torch

        if torch.is_inference_mode_enabled():
            with torch.inference_mode(False):
                return torch.empty((count, *self.shape), dtype=self.dtype, device=device)
        return torch.empty((count, *self.shape), dtype=self.dtype, device=device)


def row_layout(name: str, column: NDArray, dtype: torch.dtype | None = None) -> RowLayout:
    """The layout of a column's rows; UnsupportedData where torch has no such dtype. ``dtype``: None is the column's."""
    import torch

    shape = column.shape[1:]
    dtype = dtype or torch_dtype(column.dtype)
    if dtype is None:
        raise UnsupportedData(
            say("{name} cannot be copied to a CUDA device", name=name),
            why=say("torch {version} has no dtype for {dtype}", version=torch.__version__, dtype=column.dtype),
            fix=(say("select other columns: keys=(…)"), say("or use format='numpy'")),
        )
    return RowLayout(len(column), shape, prod(shape) * column.dtype.itemsize, dtype)


T = TypeVar("T")


@dataclass(slots=True)
class _Resource:
    value: Any
    drop: Callable[[Any], None]
    pid: int = field(default_factory=os.getpid)
    users: int = 0
    arrays: set[int] = field(default_factory=set)
    dropped: bool = False


class ResourceUse(Generic[T]):
    """One use of a resource; a second release does nothing."""

    __slots__ = ("_on_release", "resource")

    def __init__(self, resource: T, on_release: Callable[[], None]) -> None:
        self.resource = resource
        self._on_release: Callable[[], None] | None = on_release

    def release(self) -> None:
        on_release, self._on_release = self._on_release, None
        if on_release is not None:
            on_release()


class ResourceCache:
    """Resources made once per process for some arrays: registered files, copies in GPU memory.

    Registering takes 46 ms per GB and copying longer, so a program that calls ``data.batches`` every epoch must pay
    once. A resource lives while a gatherer uses it or an array that it was made for exists, and is released after both.
    Nothing is released at exit, when nothing can wait for the GPU, nor in a forked child, whose parent owns it.
    """

    def __init__(self) -> None:
        self._resources: dict[Hashable, _Resource] = {}
        # Finalizers of arrays may run anywhere in this thread, also while it holds the lock.
        self._lock = threading.RLock()

    def use(self, key: Hashable, array: Any, make: Callable[[], T], drop: Callable[[T], None]) -> ResourceUse[T]:
        """Use the resource of that key; it is made where it does not exist yet."""
        with self._lock:
            while True:
                found = self._resources.get(key)
                if found is None or found.pid != os.getpid():  # the parent process owns it
                    found = self._resources[key] = _Resource(make(), drop)
                found.users += 1
                if not found.dropped:  # otherwise a finalizer ran since
                    break
            if id(array) not in found.arrays:
                found.arrays.add(id(array))
                weakref.finalize(array, self._array_deleted, key, found, id(array)).atexit = False
            value: T = found.value
        return ResourceUse(value, partial(self._released, key, found))

    def __contains__(self, key: Hashable) -> bool:
        resource = self._resources.get(key)
        return resource is not None and resource.pid == os.getpid()

    def __len__(self) -> int:
        return len(self._resources)

    def _released(self, key: Hashable, resource: _Resource) -> None:
        with self._lock:
            resource.users -= 1
            self._drop_if_idle(key, resource)

    def _array_deleted(self, key: Hashable, resource: _Resource, array: int) -> None:
        with self._lock:
            resource.arrays.discard(array)
            self._drop_if_idle(key, resource)

    def _drop_if_idle(self, key: Hashable, resource: _Resource) -> None:
        if resource.users == 0 and not resource.arrays and not resource.dropped and resource.pid == os.getpid():
            resource.dropped = True
            del self._resources[key]
            resource.drop(resource.value)


RESOURCES = ResourceCache()
