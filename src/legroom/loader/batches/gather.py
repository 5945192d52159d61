"""Gathers rows of columns into batches on the CPU, with several threads where that is faster, into reused buffers.

Rows are copied as bytes, because numpy first copies a whole column whose numbers are not aligned. ``mode="clip"``
saves numpy a check of every row number and an intermediate buffer (20 GB/s against 7); row numbers are checked once,
before they come here.
"""

from __future__ import annotations

import _thread
import time
from collections import deque
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from math import prod
from typing import Any, Protocol

import numpy as np

from legroom.cache.cached_data import Ragged
from legroom.system.cpus import usable_cpus
from legroom.words import say

NDArray = np.ndarray[Any, Any]
Column = NDArray | Ragged
Batch = dict[str, Any]


class Gatherer(Protocol):
    """One way of making batches of some columns; opened once, used for every epoch, closed once.

    ``gather`` and ``begin`` are called by one thread at a time, the consumer's: a CUDA gatherer finds the consumer's
    device and stream current, and what it returns must be ordered on that stream. What it does ahead of time, on
    streams or threads of its own, it starts in ``begin``.
    """

    @property
    def path(self) -> str:
        """Which way: cpu, cuda-registered, cuda-pinned, cuda-copy or cuda-resident."""
        ...

    @property
    def why(self) -> str:
        """One line: why this way."""
        ...

    def gather(self, rows: NDArray) -> Batch:
        """The batch of these rows: int64, in [0, n), not empty. The caller owns the batch for good."""
        ...

    def begin(self, rows: NDArray) -> None:
        """A hint: the rows that ``gather`` will probably be asked for next (the same array object, where it is)."""
        ...

    def close(self) -> None:
        """Let go of what was opened; batches that were given stay valid. A second time does nothing."""
        ...


class HostGatherer:
    """Batches in this process's memory, as arrays or as tensors; safe to use from several threads."""

    path = "cpu"

    def __init__(
        self, columns: Mapping[str, Column], batch_size: int, tensor: Callable[[NDArray], Any] | None
    ) -> None:
        self.why = say("no device was asked for")
        self._takers = {name: _taker(column, batch_size, tensor) for name, column in columns.items()}

    def gather(self, rows: NDArray) -> Batch:
        return {name: take(rows, False) for name, take in self._takers.items()}

    def gather_aside(self, rows: NDArray) -> Batch:
        """The same on one CPU: the consumer works at the same time, perhaps on all the others."""
        return {name: take(rows, True) for name, take in self._takers.items()}

    def begin(self, rows: NDArray) -> None:
        """Nothing: a thread is worth its while only for some consumers (prefetch.py)."""

    def close(self) -> None:
        """Nothing: buffers go with the last batch."""


def _taker(
    column: Column, batch_size: int, tensor: Callable[[NDArray], Any] | None
) -> Callable[[NDArray, bool], Any]:
    kind = column.values.dtype if isinstance(column, Ragged) else column.dtype
    wrap = tensor if tensor is not None and torch_holds(kind) else _unchanged
    if isinstance(column, Ragged):
        return partial(_rows, column, wrap)
    take = _ArrayTaker(column, min(batch_size, len(column)))
    return lambda rows, aside: wrap(take(rows, aside))


class _ArrayTaker:
    """The rows of one array, as bytes."""

    def __init__(self, column: NDArray, most: int) -> None:
        self._shape, self._dtype = column.shape[1:], column.dtype
        self._row = prod(self._shape) * column.itemsize
        self._bytes = column.reshape(len(column), prod(self._shape)).view(np.uint8) if self._row else None
        self._copier = None if self._bytes is None else RowCopier(self._bytes)
        self._buffers = BufferPool(most * self._row)

    def __call__(self, rows: NDArray, aside: bool) -> NDArray:
        shape = (len(rows), *self._shape)
        if self._copier is None:
            return np.empty(shape, self._dtype)
        out = self._buffers.take(len(rows) * self._row)
        self._copier.copy(rows, out.reshape(len(rows), self._row), alone=aside)
        return out.view(self._dtype).reshape(shape)


def _rows(column: Ragged, wrap: Callable[[NDArray], Any], rows: NDArray, aside: bool) -> list[Any]:
    """Rows of different lengths: a list of arrays (copies: the originals are everybody's), or of texts."""
    if column.text:
        return [column[row] for row in rows.tolist()]
    return [wrap(column[row].copy()) for row in rows.tolist()]


def _unchanged(array: NDArray) -> NDArray:
    return array


def torch_holds(dtype: np.dtype[Any]) -> bool:
    """Whether torch has tensors of that type; it has none of texts and dates, for instance."""
    import torch

    try:
        torch.from_numpy(np.empty(0, dtype))
    except TypeError:
        return False
    return True


_LEAST_SHARED_COPY = 1 << 20  # bytes: below, starting a thread takes longer than the copy
_MOST_THREADS = 8
_TRIALS = 3  # times each, the first of which may have met fresh memory
_clock = time.perf_counter


class RowCopier:
    """Copies rows of one array, again and again, with as many threads as have been the fastest so far."""

    def __init__(self, source: NDArray) -> None:
        self._source = source

    def copy(self, rows: NDArray, out: NDArray, *, alone: bool = False) -> None:
        """The rows into ``out``; ``alone`` where the other CPUs have something else to do."""
        if alone or len(rows) < 2 or out.nbytes < _LEAST_SHARED_COPY:
            np.take(self._source, rows, axis=0, out=out, mode="clip")
            return
        row = out.nbytes // len(rows)
        trials = _trials(out.nbytes.bit_length(), row.bit_length())
        hands = trials.next()
        start = _clock()
        _copied(self._source, rows, out, hands)
        if trials.open:
            trials.took(hands, (_clock() - start) / out.nbytes)


class _Trials:
    """How long copies of one size took with each number of threads."""

    def __init__(self, choices: list[int]) -> None:
        self._least = dict.fromkeys(choices, float("inf"))
        self._left = dict.fromkeys(choices, _TRIALS if len(choices) > 1 else 0)
        self.open = len(choices) > 1
        self._best = choices[0]

    def next(self) -> int:
        """How many threads to take now; in turn while there is something to learn."""
        return max(self._left, key=self._left.__getitem__) if self.open else self._best

    def took(self, hands: int, seconds: float) -> None:
        """Seconds a byte."""
        self._left[hands] -= 1
        self._least[hands] = min(self._least[hands], seconds)
        self._best = min(self._least, key=self._least.__getitem__)
        self.open = any(left > 0 for left in self._left.values())


@cache
def _trials(_size: int, _row: int) -> _Trials:
    """The same for all copies whose sizes, and their rows', lie between the same powers of two."""
    return _Trials(_choices(usable_cpus()))


def _choices(cpus: int) -> list[int]:
    """1, 2, 4 … threads, no more than there are CPUs."""
    return [hands for hands in (1, 2, 4, _MOST_THREADS) if hands <= max(1, cpus)]


def _copied(source: NDArray, rows: NDArray, out: NDArray, hands: int) -> None:
    borders = [len(rows) * part // hands for part in range(hands + 1)]
    parts = [slice(first, last) for first, last in pairwise(borders) if first < last]
    others = [_Part(source, rows[part], out[part]) for part in parts[1:]]
    try:
        np.take(source, rows[parts[0]], axis=0, out=out[parts[0]], mode="clip")
    finally:
        # Whatever happened here: nobody may have this memory while others write to it.
        for other in others:
            other.wait()


class _Part:
    """One thread's share, begun."""

    def __init__(self, source: NDArray, rows: NDArray, out: NDArray) -> None:
        self._source, self._rows, self._out = source, rows, out
        self._problem: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()
        try:
            _thread.start_new_thread(self._copy, ())
        except RuntimeError:  # no thread is to be had: done here and now
            self._copy()

    def _copy(self) -> None:
        try:
            np.take(self._source, self._rows, axis=0, out=self._out, mode="clip")
        except BaseException as problem:
            self._problem = problem  # belongs to whoever waits
        finally:
            self._done.release()

    def wait(self) -> None:
        with self._done:
            if self._problem is not None:
                raise self._problem


_PAGE = 4096
_KEPT = 4  # free blocks: one being consumed, one ready, one being filled, one to spare


class BufferPool:
    """Equal blocks of memory, as many as are in use at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Bounded: what a consumer kept and drops all at once goes back to the system. Appending and popping are
        # single steps, so that a Lease may die in any thread, between any two lines.
        self._free: deque[_Block] = deque(maxlen=_KEPT)

    def take(self, nbytes: int) -> NDArray:
        """The first ``nbytes`` bytes of a block that is nobody's, as uint8; it is the caller's until the array dies."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(np.empty(self.nbytes + _PAGE, np.uint8))
        return np.asarray(_Lease(block, nbytes, self._free))


class _Block:
    """Memory, and where its first page begins: found once, because numpy takes a microsecond to say it."""

    __slots__ = ("_memory", "start")

    def __init__(self, memory: NDArray) -> None:
        self._memory = memory
        address = memory.ctypes.data
        self.start = address + -address % _PAGE


class _Lease:
    """What a batch's array says its memory belongs to."""

    __slots__ = ("__array_interface__", "_block", "_free")

    def __init__(self, block: _Block, nbytes: int, free: deque[_Block]) -> None:
        self._block, self._free = block, free
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.start, False),
        }

    def __del__(self) -> None:
        self._free.append(self._block)
