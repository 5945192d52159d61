"""Chunked HDF5 datasets as slabs of whole rows, for writers that want bytes rather than a filled array.

Covers: datasets whose chunks span whole rows, each written, so that chunks in order are the array in order.
Does not cover: other chunk shapes and missing chunks (hdf5_chunks.py fills an array with those).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from math import prod

import numpy as np

from legroom.formats.dtypes import DType
from legroom.formats.hdf5_chunks import Chunk, ChunkedDataset, called
from legroom.formats.hdf5_filters import memory_to_undo, undo
from legroom.formats.memory import UNLIMITED, DecodingMemory
from legroom.formats.protocol import ArraySpec, Slab
from legroom.formats.source import SourceFile, damaged
from legroom.words import say

_PIECE = 1 << 20  # of a chunk that needs no decoding
_SLAB = 2 << 20  # decoded bytes of one slab: small enough to share out, large enough for a thread


def slabs_of(
    source: ChunkedDataset,
    file: SourceFile,
    file_dtype: DType,
    spec: ArraySpec,
    memory: DecodingMemory = UNLIMITED,
) -> list[Slab] | None:
    """The dataset as slabs, or None where its chunks are not the array cut into runs of rows."""
    if not source.direct or not spec.nbytes or source.chunk[1:] != source.shape[1:]:
        return None
    table = sorted(source.table, key=lambda chunk: chunk.first)
    if len(table) < source.count:
        return None
    row = spec.nbytes // source.shape[0]
    decoder = _Rows(source, file, file_dtype, spec, row, memory)
    step = max(1, _SLAB // (row * source.chunk[0]))
    slabs = []
    for index in range(0, len(table), step):
        batch = table[index : index + step]
        first = batch[0].first[0]
        last = min(source.shape[0], batch[-1].first[0] + source.chunk[0])
        decoding = max(map(decoder.decoding, batch))
        slabs.append(Slab(first * row, (last - first) * row, partial(decoder.decode, batch), decoding))
    return slabs


class _Rows:
    """Decodes chunks into the bytes of their rows; threads share it and it keeps no state."""

    def __init__(
        self,
        source: ChunkedDataset,
        file: SourceFile,
        file_dtype: DType,
        spec: ArraySpec,
        row: int,
        memory: DecodingMemory,
    ) -> None:
        self.source, self.file, self.row, self.memory = source, file, row, memory
        self.file_dtype, self.dtype = file_dtype, spec.dtype
        inner = spec.shape[len(source.shape) :]
        self.chunk_bytes = prod((*source.chunk, *inner)) * file_dtype.itemsize

    def decoding(self, chunk: Chunk) -> int:
        """Bytes of memory that the chunk takes at once."""
        if self._is_plain(chunk):
            return min(_PIECE, chunk.size)
        convert = self.file_dtype != self.dtype
        return memory_to_undo(self.source.filters, chunk.size, self.chunk_bytes, convert=convert)

    def decode(self, batch: list[Chunk]) -> Iterator[memoryview]:
        for chunk in batch:
            length = min(self.source.chunk[0], self.source.shape[0] - chunk.first[0]) * self.row
            if self._is_plain(chunk):
                for start in range(0, length, _PIECE):
                    count = min(_PIECE, length - start)
                    yield memoryview(self.file.read_at(chunk.offset + start, count))
                continue
            with self.memory.take(self.decoding(chunk), called(self.source.path, chunk)):
                yield self._plain(chunk)[:length]

    def _is_plain(self, chunk: Chunk) -> bool:
        """Whether the chunk's bytes lie in the file as they will lie in memory."""
        plain = not self.source.filters and self.file_dtype == self.dtype
        return plain and chunk.size == self.chunk_bytes

    def _plain(self, chunk: Chunk) -> memoryview:
        try:
            plain = undo(
                self.source.filters,
                self.file.read_at(chunk.offset, chunk.size),
                chunk.mask,
                self.chunk_bytes,
            )
        except ValueError as problem:
            if chunk.size != self.chunk_bytes or not self.source.at_edge(chunk):
                raise damaged(
                    self.source.path,
                    say("the chunk at {first}: {problem}", first=chunk.first, problem=problem),
                ) from problem
            return self._by_hdf5(chunk)  # left unfiltered, or damaged: HDF5 knows which
        if self.file_dtype == self.dtype:
            return plain.data
        return plain.view(self.file_dtype).astype(self.dtype).view(np.uint8).data

    def _by_hdf5(self, chunk: Chunk) -> memoryview:
        values = self.source.read(chunk).astype(self.dtype, copy=False)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
