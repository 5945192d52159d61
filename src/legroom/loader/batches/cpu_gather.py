"""Gathers rows of columns into batches on the CPU, with several threads where that is faster, into reused buffers.

Rows are copied as bytes, because numpy first copies a whole column whose numbers are not aligned. ``mode="clip"``
saves numpy a check of every row number and an intermediate buffer (20 GB/s against 7); row numbers are checked once,
before they come here.

GatherThreads prepare batches beside a training loop, with as few Python instructions as possible. A loop that is bound
by launching kernels holds the interpreter's lock most of the time, and each time a helper needs the lock, one of both
waits. So a helper gets one large copy per batch, not many small ones, and is woken by a lock, not by a Future.
"""

from __future__ import annotations

import _thread
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache, partial
from itertools import pairwise
from math import prod
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

import numpy as np

from legroom.cache.cached_arrays_and_tables import Ragged, bits_of
from legroom.cache.cached_tables import ColumnChunks
from legroom.messages import say
from legroom.system.processes_and_threads import (
    Alive,
    room_for_threads,
    start_daemon_thread,
    start_thread_at_once,
    usable_cpus,
)

if TYPE_CHECKING:
    import torch

    from legroom.records.cache_entry import Entry

NDArray = np.ndarray[Any, Any]
Column = NDArray | Ragged | ColumnChunks
Batch = dict[str, Any]


class Gatherer(Protocol):
    """Makes batches of some columns; opened once and used for every epoch. What it holds is released with it.

    ``gather`` and ``begin`` are called by one thread at a time, the consumer's. A CUDA gatherer finds the consumer's
    device and stream current, and its result must be ordered on that stream. Prefetching, on streams or threads of its
    own, starts in ``begin``.
    """

    @property
    def path(self) -> str:
        """cpu, cuda-registered, cuda-pinned, cuda-copy or cuda-resident."""
        ...

    @property
    def why(self) -> str:
        """One line: why this path."""
        ...

    @property
    def ahead(self) -> int:
        """How many batches may be begun before the one that is gathered next."""
        ...

    def gather(self, rows: NDArray) -> Batch:
        """The batch of these rows: int64, in [0, n), not empty. The caller owns the batch."""
        ...

    def begin(self, rows: NDArray) -> None:
        """A hint: the rows of a ``gather`` to come, which then passes the same array object; in order."""
        ...


class HostGatherer:
    """Batches in RAM, as arrays or as tensors; safe to use from several threads."""

    path = "cpu"
    ahead = 1

    def __init__(
        self, columns: Mapping[str, Column], batch_size: int, types: Mapping[str, torch.dtype | None] | None
    ) -> None:
        """``types``: those of the columns as tensors; None for a column, or for all: they stay arrays."""
        self.group = _group(columns.values(), batch_size)  # how many batches ``gather_run`` gathers at once
        self._takers = [
            (name, _taker(column, batch_size, self.group), _wrapper(column, types[name] if types else None))
            for name, column in columns.items()
        ]

    @property
    def why(self) -> str:
        return say("no device was given")

    def gather(self, rows: NDArray) -> Batch:
        batch = {}  # not a comprehension, which is a call of its own: small batches notice
        for name, take, wrap in self._takers:
            batch[name] = wrap(take(rows, False))
        return batch

    def gather_run(self, rows: NDArray) -> Iterator[Batch]:
        """The batches of each line of ``rows``, one after the other. Small ones are gathered together."""
        if self.group == 1:
            for one in rows:
                yield self.gather(one)
            return
        for first in range(0, len(rows), self.group):
            batches = self._gather_group(rows[first : first + self.group])
            while batches:  # not a loop over it: the memory of a group is free when its last batch is dropped
                yield batches.pop()

    def _gather_group(self, rows: NDArray) -> list[Batch]:
        """The batches of each line of ``rows``, the last one first, by one copy of each column.

        Calling numpy takes as long as a small copy. Each batch has tensors and storages of its own.
        """
        count, size = rows.shape
        together = rows.reshape(-1)
        firsts = range((count - 1) * size, -1, -size)
        batches: list[Batch] = [{} for _ in firsts]
        for name, take, wrap in self._takers:
            taken = take(together, True)
            for batch, first in zip(batches, firsts, strict=True):
                batch[name] = wrap(taken[first : first + size])
        return batches

    def gather_on_one_core(self, rows: NDArray) -> Batch:
        """The same with one thread, because the consumer works at the same time, perhaps on all other cores."""
        return {name: wrap(take(rows, True)) for name, take, wrap in self._takers}

    def begin(self, rows: NDArray) -> None:
        """Nothing: batch_iterator.py decides whether a thread pays."""


_MOST_GROUPED = 256 << 10  # bytes of the batches that are gathered by one call: they stay in a core's cache
_LARGEST_GROUP = 16


def _group(columns: Iterable[Column], batch_size: int) -> int:
    """How many batches of these columns to gather at once; 1 where a batch is large or its rows are Python objects."""
    row = 0
    for column in columns:
        if not isinstance(column, np.ndarray):
            return 1
        row += prod(column.shape[1:]) * column.itemsize
    return max(1, min(_LARGEST_GROUP, _MOST_GROUPED // max(1, row * batch_size)))


Taker = Callable[[NDArray, bool], Any]  # row numbers, and whether to use one core only; gives an array, or a list


def _wrapper(column: Column, dtype: torch.dtype | None) -> Callable[[Any], Any]:
    """What makes the value of a batch from the rows that were taken: a tensor of that type, or the rows themselves."""
    wrap: Callable[[Any], Any] = _unchanged
    if dtype is not None:
        import torch

        wrap = torch.from_numpy
        if dtype != torch_dtype(_dtype(column)):
            wrap = lambda rows: torch.from_numpy(rows).view(dtype)  # noqa: E731
    if not isinstance(column, Ragged):
        return wrap
    return _unchanged if column.text else lambda rows: [wrap(row) for row in rows]


def _taker(column: Column, batch_size: int, group: int) -> Taker:
    if isinstance(column, Ragged):
        return partial(_rows, column)
    if isinstance(column, ColumnChunks):
        return lambda rows, one_core: column.take(rows)
    most = min(batch_size, len(column))
    if column.nbytes and (not column.flags.c_contiguous or _few(most * group, column[:1].nbytes)):
        return _item_taker(column)
    return _ArrayTaker(column, most, group)


_FEW_ROWS, _LARGE_ROW = 256, 1024


def _few(rows: int, row: int) -> bool:
    """Whether a call takes so little that a buffer, 3 us, costs more than items, each 14 ns more than a row."""
    return rows * row <= _MOST_GROUPED and (rows <= _FEW_ROWS or row >= _LARGE_ROW)


class _ArrayTaker:
    """The rows of one array, as bytes."""

    def __init__(self, column: NDArray, most: int, group: int) -> None:
        self._shape, self._dtype = column.shape[1:], column.dtype
        self._row = prod(self._shape) * column.itemsize
        self._bytes = column.reshape(len(column), prod(self._shape)).view(np.uint8) if self._row else None
        self._copier = None if self._bytes is None else RowCopier(self._bytes)
        self._most = most
        self._buffers = BufferPool(most * self._row)
        self._of_groups = BufferPool(most * group * self._row)

    def __call__(self, rows: NDArray, one_core: bool) -> NDArray:
        shape = (len(rows), *self._shape)
        if self._copier is None:
            return np.empty(shape, self._dtype)
        buffers = self._buffers if len(rows) <= self._most else self._of_groups
        out = buffers.take(len(rows) * self._row)
        self._copier.copy(rows, out.reshape(len(rows), self._row), one_core=one_core)
        return out.view(self._dtype).reshape(shape)


def _item_taker(column: NDArray) -> Taker:
    """Takes rows as single items into new memory: a few rows, and rows that overlap or have gaps between them.

    ``numpy.take`` would first copy the whole column if its rows overlap, as windows of tokens do. Indexing cannot write
    into a buffer, but is as fast as ``take`` into one.
    """
    elements = prod(column.shape[1:])
    items = column.reshape(len(column), elements).view(f"V{elements * column.itemsize}")[:, 0]
    # A type with the shape of a row: one view makes an array of rows from items, which small batches notice.
    row = np.dtype((column.dtype, column.shape[1:]))
    return lambda rows, one_core: items[rows].view(row)


def _rows(column: Ragged, rows: NDArray, one_core: bool) -> list[Any]:
    """Rows of different lengths: a list of arrays (copies: the originals are shared), or of strings."""
    if column.text:
        return [column[row] for row in rows.tolist()]
    return [column[row].copy() for row in rows.tolist()]


def _unchanged(array: NDArray) -> NDArray:
    return array


def types_of(columns: Mapping[str, Column], entry: Entry) -> dict[str, torch.dtype | None]:
    """The columns' types as tensors; None where torch has none."""
    return {name: torch_dtype(_dtype(column), bits_of(entry, name)) for name, column in columns.items()}


def _dtype(column: Column) -> np.dtype[Any]:
    found: np.dtype[Any] = column.values.dtype if isinstance(column, Ragged) else column.dtype
    return found


@cache
def torch_dtype(dtype: np.dtype[Any], bits: str | None = None) -> torch.dtype | None:
    """torch's dtype for that; it has none for strings and dates. ``bits``: its name, where numpy has no such type."""
    import torch

    try:
        own = torch.from_numpy(np.empty(0, dtype)).dtype
    except (TypeError, ValueError):
        return None
    return own if bits is None else getattr(torch, bits, None)


_LEAST_SHARED_COPY = 1 << 20  # bytes: below, starting a thread takes longer than the copy
_MOST_THREADS = 8
_TRIALS = 3  # per number of threads; the first may include page faults
_clock = time.perf_counter


class RowCopier:
    """Copies rows of one array, with the number of threads that has been fastest so far.

    One core does not use a machine's whole memory bandwidth: with two, batches of 12 MB are a sixth faster (AMD EPYC),
    and batches of 1.5 MB a quarter slower, because a thread has to be started and waited for. So each number of threads
    is tried a few times, and the fastest stays for all copies of about that size in this process. A thread lives for
    one copy, as in batch_iterator.py and for the same reason.
    """

    def __init__(self, source: NDArray) -> None:
        self._source = source

    def copy(self, rows: NDArray, out: NDArray, *, one_core: bool = False) -> None:
        """Copy the rows into ``out``; with ``one_core`` in this thread only."""
        if one_core or len(rows) < 2 or out.nbytes < _LEAST_SHARED_COPY:
            np.take(self._source, rows, axis=0, out=out, mode="clip")
            return
        row = out.nbytes // len(rows)
        trials = _trials(out.nbytes.bit_length(), row.bit_length())
        threads = trials.next()
        if threads > 1 and not room_for_threads(threads - 1):
            threads = 1  # a thread could end before it begins, and would be waited for
        start = _clock()
        _copy_rows(self._source, rows, out, threads)
        if trials.open:
            trials.record(threads, (_clock() - start) / out.nbytes)


class _Trials:
    """How long copies of one size took with each number of threads."""

    def __init__(self, choices: list[int]) -> None:
        self._least = dict.fromkeys(choices, float("inf"))
        self._left = dict.fromkeys(choices, _TRIALS if len(choices) > 1 else 0)
        self.open = len(choices) > 1
        self._best = choices[0]

    def next(self) -> int:
        """How many threads to use now: each number in turn until all trials are done."""
        return max(self._left, key=self._left.__getitem__) if self.open else self._best

    def record(self, threads: int, seconds: float) -> None:
        """Record seconds per byte."""
        self._left[threads] -= 1
        self._least[threads] = min(self._least[threads], seconds)
        self._best = min(self._least, key=self._least.__getitem__)
        self.open = any(left > 0 for left in self._left.values())


@cache
def _trials(_size: int, _row: int) -> _Trials:
    """Shared by all copies whose size and row size are between the same powers of two."""
    return _Trials([threads for threads in (1, 2, 4, _MOST_THREADS) if threads <= max(1, usable_cpus())])


def _copy_rows(source: NDArray, rows: NDArray, out: NDArray, threads: int) -> None:
    first, *others = _parts(len(rows), threads)
    tasks = [start_task(partial(np.take, source, rows[part], 0, out[part], "clip")) for part in others]
    try:
        np.take(source, rows[first], axis=0, out=out[first], mode="clip")
    finally:
        wait_for(tasks)


def _parts(count: int, pieces: int) -> list[slice]:
    """So many rows in pieces of about the same size, none of them empty."""
    borders = [count * piece // pieces for piece in range(pieces + 1)]
    return [slice(first, last) for first, last in pairwise(borders) if first < last]


_PAGE = 4096
_KEPT = 4  # free blocks: one being consumed, one ready, one being filled, one to spare


class BufferPool:
    """Page-aligned buffers of one size, reused once no batch uses them.

    A batch's array refers to a block through a lease: the array, and any view or tensor of it, keeps the lease alive.
    When the last of them is deleted, the block is returned. A consumer that keeps its batches gets new memory. Blocks
    are private memory, so a forked child that drops its batches returns its own copy.

    The block that came back last is reused first: it is most likely still in the CPU cache. Writing to a destination
    off a page boundary is three times as slow (8 against 22 GB/s), so blocks begin on one.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Bounded: batches that a consumer drops all at once are returned to the system. Appending and popping are
        # atomic, so a lease may end in any thread, between any two lines.
        self._free: deque[_Block] = deque(maxlen=_KEPT)

    def take(self, nbytes: int) -> NDArray:
        """The first ``nbytes`` bytes of a free block, as uint8; the caller owns it until the array is deleted."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(np.empty(self.nbytes + _PAGE, np.uint8))
        return np.asarray(_Lease(block, nbytes, self._free))


class _Block:
    """Memory, and the address of its first page: read once, because numpy takes a microsecond for it."""

    __slots__ = ("_memory", "start")

    def __init__(self, memory: NDArray) -> None:
        self._memory = memory
        address = memory.ctypes.data
        self.start = address + -address % _PAGE


_DROPPED: deque[Any] = deque(maxlen=0)  # keeps nothing


class _Lease:
    """The owner of the memory of a batch's array."""

    _block: _Block | None = None
    _free = _DROPPED  # of one whose making was interrupted

    def __init__(self, block: _Block, nbytes: int, free: deque[_Block]) -> None:
        self._block, self._free = block, free
        self.__array_interface__ = {"version": 3, "shape": (nbytes,), "typestr": "|u1", "data": (block.start, False)}

    def __del__(self) -> None:
        self._free.append(self._block)


T = TypeVar("T")
_LEAST_PART = 512 << 10  # bytes per thread: below, waking it takes longer than the copy
_CHECKED_S = 0.2  # seconds of waiting for a thread between two looks whether it lives
_END_S = 60.0  # for a thread to end its last copy


class Task(Generic[T]):
    """A call in another thread; ``result`` waits for it."""

    __slots__ = ("_alive", "_call", "_value", "_wake", "problem", "ready")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._value: T | None = None
        self._alive: Alive | None = None
        self.problem: BaseException | None = None
        self.ready = False  # whether ``result`` does not wait
        self._wake = _thread.allocate_lock()
        self._wake.acquire()

    def start(self) -> bool:
        """Run it in a thread of its own; False where none can be started."""
        self._alive = start_thread_at_once(self.run)
        return self._alive is not None

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value = call()
        except BaseException as problem:
            self.problem = problem  # raised in the thread that waits
        finally:
            self.ready = True
            self._wake.release()

    def wait(self) -> None:
        """Wait until it has run. If its thread had too little memory to begin, it runs here."""
        while not self.ready:
            if self._wake.acquire(timeout=_CHECKED_S):
                self._wake.release()
            elif self._alive is not None and self._alive() is None and not self.ready:
                if self._call is not None:
                    self.run()
                else:
                    self.problem, self.ready = MemoryError(say("a thread ended because no memory was left")), True

    def result(self) -> T:
        self.wait()
        if self.problem is not None:
            raise self.problem
        value: T = self._value  # type: ignore[assignment]
        return value


def wait_for(tasks: list[Task[Any]]) -> None:
    """Wait for all, then raise the first error: their memory must not be reused while one of them writes to it."""
    for task in tasks:
        task.wait()
    for task in tasks:
        if task.problem is not None:
            raise task.problem


def start_task(call: Callable[[], T]) -> Task[T]:
    """The call in a thread of its own; where none can be started, it is made here."""
    task = Task(call)
    if not task.start():
        task.run()
    return task


class TaskThread:
    """One thread that runs tasks in order. Where none can be started, tasks run at once."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._thread = start_daemon_thread(partial(_run_tasks, self._tasks), name)
        # At exit too: memory that a thread writes to must not be freed under it.
        self._stop = weakref.finalize(self, _stop, self._tasks, self._thread)

    def start(self, call: Callable[[], T]) -> Task[T]:
        """Run this call after those before it."""
        task = Task(call)
        if self._thread is None:
            task.run()
        else:
            self._tasks.put(task)
        return task

    def stop(self) -> None:
        """End the thread after its tasks; waits, unless it is this one."""
        self._stop()


def _run_tasks(tasks: SimpleQueue[Task[Any] | None]) -> None:
    """What the thread does; it refers to nothing else, so that its owner can be freed."""
    while (task := tasks.get()) is not None:
        task.run()
        del task


def _stop(tasks: SimpleQueue[Task[Any] | None], thread: threading.Thread | None) -> None:
    tasks.put(None)
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(_END_S)


class RowThreads:
    """Threads that copy rows of arrays into page-locked memory, each one part of a batch."""

    def __init__(self) -> None:
        helpers = max(0, min(_MOST_THREADS, usable_cpus()) - 1)
        self._helpers = [TaskThread("legroom-gather") for _ in range(helpers)] if room_for_threads(helpers) else []

    def copy(self, column: NDArray, rows: NDArray, into: NDArray) -> None:
        """Copy these rows of a column, as bytes; this thread copies a part too."""
        if not into.nbytes:
            return
        parts = max(1, min(1 + len(self._helpers), into.nbytes // _LEAST_PART, len(rows)))
        if parts == 1:
            take_rows(column, rows, into)
            return
        row = into.nbytes // len(rows)
        first, *others = _parts(len(rows), parts)
        tasks = [
            helper.start(partial(take_rows, column, rows[part], into[part.start * row : part.stop * row]))
            for helper, part in zip(self._helpers, others, strict=False)
        ]
        try:
            take_rows(column, rows[first], into[: first.stop * row])
        finally:
            wait_for(tasks)

    def stop(self) -> None:
        """End the threads."""
        for helper in self._helpers:
            helper.stop()


def take_rows(column: NDArray, rows: NDArray, into: NDArray) -> None:
    """Copy some rows of a column as bytes; numpy releases the interpreter's lock meanwhile."""
    count = len(rows)
    if not column.flags.c_contiguous:  # numpy would make a contiguous copy of all of it
        into.reshape(count, -1)[:] = np.ascontiguousarray(column[rows]).reshape(count, -1).view(np.uint8)
        return
    whole = column.reshape(len(column), -1).view(np.uint8)
    np.take(whole, rows, axis=0, out=into.reshape(count, -1), mode="clip")
