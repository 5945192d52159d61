"""Ragged bytes that lie in many ranges of a file: cut them into slabs, and read neighbouring ranges together.

An archive holds the rows of a ragged array one by one, with headers or other columns between them. A slab is some
megabytes of the array. One thread reads a slab: ranges with small gaps between them come with one read, and a range
larger than a read comes in several.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import pairwise
from typing import Protocol

import numpy as np

from legroom.formats.base_reader import ArraySpec, BaseReader, Slab, TableSpec
from legroom.formats.decoding_memory_budget import DecodingMemory
from legroom.formats.fill_output_arrays import PIECE, Array, Progress, bytes_of, in_parallel

_MOST_ROWS = 1 << 14  # of one slab: each takes about 200 bytes while its slab is read
_READ = 1 << 20  # bytes of one read
_GAP = 16 << 10  # bytes between two ranges that are read and thrown away rather than skipped
_FEW = 64  # more rows than this of one read are joined: each part of a write costs a call
SLAB_MEMORY = PIECE  # bytes that reading one slab takes: three reads, and its rows
_STEP = 16 << 20  # free memory is measured again for each step

Decode = Callable[[int, int], Iterator[memoryview]]  # (first byte, byte after the last) of an array


class GrowingMemory:
    """Counts memory that grows by a few bytes at a time: each step is required to be free before it is taken."""

    def __init__(self, memory: DecodingMemory, what: str, most: int = _STEP) -> None:
        self._memory, self._what = memory, what
        self._step = max(1, min(_STEP, most))
        self._left = 0

    def add(self, nbytes: int) -> None:
        """Count bytes that are about to be taken."""
        self._left -= nbytes
        if self._left < 0:
            self._left = max(self._step, nbytes)
            self._memory.require(self._left, self._what)


def ragged_specs(name: str, rows: int, nbytes: int, *, text: bool = False, **meaning: str) -> list[ArraySpec]:
    """The two arrays of a ragged array of bytes. What the values mean is an attribute of both."""
    offsets = ArraySpec(f"{name}/offsets", (rows + 1,), np.dtype(np.int64), meaning, name, meaning=meaning)
    values = ArraySpec(f"{name}/values", (nbytes,), np.dtype(np.uint8), meaning, name, text, meaning)
    return [offsets, values]


def slabs_of_rows(offsets: Array, decode: Decode, decoding: int = SLAB_MEMORY) -> list[Slab]:
    """Slabs of a ragged array: of 8 MB or less, and of a limited number of rows."""
    total = int(offsets[-1])
    cuts = np.unique(np.concatenate([np.arange(0, total, PIECE), offsets[::_MOST_ROWS], [total]])).tolist()
    return [Slab(start, end - start, partial(decode, start, end), decoding) for start, end in pairwise(cuts)]


def rows_between(offsets: Array, start: int, end: int) -> tuple[int, Array, Array]:
    """The rows with bytes from ``start`` to ``end``: the first one's number; of each, what to skip and its length."""
    number = offsets.dtype.type  # of the same type: numpy would convert the whole array
    first = int(np.searchsorted(offsets, number(start), "right")) - 1
    last = int(np.searchsorted(offsets, number(end), "left"))
    bounds = offsets[first : last + 1].astype(np.int64)
    skip = np.zeros(last - first, np.int64)
    skip[0] = start - int(bounds[0])
    lengths = np.minimum(bounds[1:], end) - np.maximum(bounds[:-1], start)
    return first, skip, lengths


class ReadAt(Protocol):
    """What ranges are read from: a file, or bytes in memory."""

    def read_at(self, offset: int, count: int, /) -> bytes | memoryview: ...


def gather_ranges(
    file: ReadAt, starts: Array, offsets: Array, memory: DecodingMemory, what: str, start: int, end: int
) -> Iterator[memoryview]:
    """Some bytes of a ragged array whose row ``i`` begins at ``starts[i]`` of a file."""
    with memory.take(SLAB_MEMORY, what):
        first, skip, lengths = rows_between(offsets, start, end)
        filled = np.flatnonzero(lengths)
        begins = (starts[first : first + len(lengths)].astype(np.int64) + skip)[filled]
        yield from _read_together(file, begins.tolist(), (begins + lengths[filled]).tolist())


def _read_together(file: ReadAt, begins: Sequence[int], ends: Sequence[int]) -> Iterator[memoryview]:
    index = 0
    while index < len(begins):
        begin, stop = begins[index], index + 1
        while stop < len(begins) and 0 <= begins[stop] - ends[stop - 1] <= _GAP and ends[stop] - begin <= _READ:
            stop += 1
        if stop == index + 1:
            for at in range(begin, ends[index], _READ):
                yield memoryview(file.read_at(at, min(_READ, ends[index] - at)))
        else:
            data = memoryview(file.read_at(begin, ends[stop - 1] - begin))
            rows = [data[begins[row] - begin : ends[row] - begin] for row in range(index, stop)]
            if len(rows) > _FEW:
                yield memoryview(b"".join(rows))
            else:
                yield from rows
        index = stop


def read_slabs(slabs: Sequence[Slab], out: Array, progress: Progress) -> None:
    """Fill an array from its slabs, in threads."""
    view = bytes_of(out)

    def fill(slab: Slab) -> int:
        at = slab.start
        for part in slab.decode():
            view[at : at + len(part)] = part
            at += len(part)
        if at != slab.start + slab.nbytes:
            raise AssertionError(f"a slab of {slab.nbytes} bytes gave {at - slab.start}")
        return slab.nbytes

    progress(0)
    in_parallel((partial(fill, slab) for slab in slabs), progress)


class SlabReader(BaseReader):
    """A reader of ragged arrays that come in slabs; ``_small`` gives the other arrays, which are in memory."""

    _accounts_memory = True
    _slab_memory = SLAB_MEMORY

    def _small(self, spec: ArraySpec) -> Array:
        raise NotImplementedError

    def _read(self, spec: ArraySpec, out: Array, progress: Progress) -> None:
        slabs = self._slabs(spec)
        if slabs is not None:
            read_slabs(slabs, out, progress)
            return
        out[...] = self._small(spec)
        progress(out.nbytes)

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        assert isinstance(spec, ArraySpec)
        return self._slab_memory if self._slabs(spec) is not None else 0
