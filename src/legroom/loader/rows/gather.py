"""Rows of columns, brought together as a batch.

Covers: what every way of gathering offers, and gathering on the CPU. Does not cover: CUDA (cuda.py), which rows
(order.py), doing it ahead of time (prefetch.py).

Rows are copied as bytes, whatever their type: numpy would first copy a whole column whose numbers are not aligned.
``mode="clip"`` spares numpy a look at every row number and a buffer between (20 GB/s against 7); row numbers are
checked once, before they come here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from math import prod
from typing import Any, Protocol

import numpy as np

from legroom.cache.ragged import Ragged
from legroom.loader.rows.buffers import Buffers
from legroom.loader.rows.hands import Copier
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
        self._copier = None if self._bytes is None else Copier(self._bytes)
        self._buffers = Buffers(most * self._row)

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
