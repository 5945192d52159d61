"""Read chunked HDF5 datasets without HDF5: threads decode chunks from the file, into an array or as slabs.

Undoes the filters deflate, shuffle and fletcher32 in any order, and honors the mask of filters that a chunk skipped.
Handles edge chunks and chunks that were never written. HDF5 itself undoes all other filters, through h5py; hdf5plugin
is imported if it may provide one.

HDF5 is only asked for the chunks' offsets. It holds one lock for the whole process while it decompresses; here all
cores decompress.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property, partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, Slab
from legroom.formats.decoding_memory_budget import DecodingMemory
from legroom.formats.decompress_deflate import Bytes, inflate
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.fill_output_arrays import Array, DType, Progress, bytes_of, in_parallel
from legroom.formats.hdf5_open import hdf5_errors
from legroom.messages import say

_LOCATION, _LOCATION_AXIS = 300, 40  # bytes of memory per ChunkLocation and axis; 236 to 254 measured
_FEW = 4 << 20  # bytes of locations below which chunks are not counted first
_TASK = 2 << 20  # decoded bytes of a task or slab: small enough to distribute, large enough for a thread
_PIECE = 1 << 20  # bytes read at once of a chunk that needs no decoding


@dataclass(frozen=True, slots=True)
class ChunkLocation:
    """Where one chunk is: its first element, its bytes in the file, the mask of filters it skipped."""

    first: tuple[int, ...]
    offset: int
    size: int
    mask: int


@dataclass(frozen=True)
class ChunkedDataset:
    """A chunked dataset that can be read without HDF5."""

    dataset: Any
    path: Path
    shape: tuple[int, ...]
    chunk: tuple[int, ...]
    filters: tuple[ChunkFilter, ...]
    direct: bool  # chunk offsets are offsets in the file
    memory: DecodingMemory

    def region(self, chunk: ChunkLocation) -> tuple[slice, ...]:
        """The part of the dataset that a chunk covers; numpy crops it at the edges."""
        return tuple(slice(first, first + step) for first, step in zip(chunk.first, self.chunk, strict=True))

    def at_edge(self, chunk: ChunkLocation) -> bool:
        """Whether the chunk extends beyond the dataset."""
        ends = zip(chunk.first, self.chunk, self.shape, strict=True)
        return any(first + step > length for first, step, length in ends)

    def read(self, chunk: ChunkLocation) -> Array:
        """Let HDF5 read one chunk."""
        with hdf5_errors(self.path, f"the chunk at {chunk.first}"):
            return np.asarray(self.dataset[self.region(chunk)])

    @cached_property
    def table(self) -> list[ChunkLocation]:
        """Every chunk that exists, in the order of the file."""
        return _chunk_table(self)

    def decoding(self, size: int) -> int:
        """Upper bound of the memory to decode one chunk of ``size`` plain bytes."""
        return memory_to_undo(self.filters, max((chunk.size for chunk in self.table), default=0), size)

    @property
    def count(self) -> int:
        """Number of chunks if all are written."""
        return prod(-(-length // step) for length, step in zip(self.shape, self.chunk, strict=True))


def chunked(dataset: Any, path: Path, memory: DecodingMemory) -> ChunkedDataset | None:
    """The dataset's chunks, or None if HDF5 itself must read it."""
    if dataset.chunks is None or not hasattr(dataset.id, "chunk_iter"):
        return None
    filters = filters_of(dataset.id.get_create_plist())
    uneven = any(length % step for length, step in zip(dataset.shape, dataset.chunks, strict=True))
    # A file may leave its edge chunks unfiltered, and h5py has no call to find out. The size of a deflated or
    # checksummed chunk shows it; shuffle alone changes no size.
    if not can_undo(filters) or (uneven and filters and all(one.code == SHUFFLE for one in filters)):
        return None
    # HDF5 before 1.14.4 returned chunk offsets that do not include the user block.
    from h5py.version import hdf5_version_tuple

    direct = dataset.file.userblock_size == 0 or hdf5_version_tuple >= (1, 14, 4)
    return ChunkedDataset(dataset, path, dataset.shape, dataset.chunks, filters, direct, memory)


def read_chunks(source: ChunkedDataset, file: SourceFile, file_dtype: DType, out: Array, progress: Progress) -> None:
    """Decode every chunk into ``out``, whose leading axes are the dataset's."""
    if out.nbytes == 0:
        progress(0)
        return
    table = source.table
    if len(table) < source.count:
        out[...] = _fill_value(source, out)  # for chunks never written
    decoder = _Decoder(source, file, file_dtype, out)
    arrived = 0

    def count(done: int) -> None:
        nonlocal arrived
        arrived += done
        progress(done)

    def tasks() -> Iterator[Callable[[], int]]:
        step = max(1, _TASK // max(1, decoder.chunk_bytes))
        for start in range(0, len(table), step):
            yield partial(decoder.decode_all, table[start : start + step])

    in_parallel(tasks(), count)
    for chunk in decoder.left_to_hdf5:
        count(decoder.read_by_hdf5(chunk))
    progress(out.nbytes - arrived)


class _Decoder:
    """Decodes chunks into ``out``; threads share it, each chunk has its own region."""

    def __init__(self, source: ChunkedDataset, file: SourceFile, file_dtype: DType, out: Array) -> None:
        self.source, self.file, self.out, self.file_dtype = source, file, out, file_dtype
        self.chunk_shape = source.chunk + out.shape[len(source.shape) :]
        self.chunk_bytes = prod(self.chunk_shape) * file_dtype.itemsize
        self.as_is = source.direct and not source.filters and file_dtype == out.dtype
        self.left_to_hdf5: list[ChunkLocation] = []

    def decode_all(self, batch: list[ChunkLocation]) -> int:
        return sum(self.decode(chunk) for chunk in batch)

    def decode(self, chunk: ChunkLocation) -> int:
        """Decode one chunk into ``out``; returns the bytes written."""
        target = self.out[self.source.region(chunk)]
        whole = target.shape == self.chunk_shape and target.flags.c_contiguous
        if self.as_is and whole and chunk.size == self.chunk_bytes:
            self.file.read_into(chunk.offset, bytes_of(target))
            return chunk.size
        needed = memory_to_undo(self.source.filters, chunk.size, self.chunk_bytes)
        with self.source.memory.take(needed, _label(self.source.path, chunk)):
            return self._decode_into(chunk, target)

    def _decode_into(self, chunk: ChunkLocation, target: Array) -> int:
        plain = _undo_filters(self.source, self.file, chunk, self.chunk_bytes)
        if plain is None:
            self.left_to_hdf5.append(chunk)
            return 0
        values = plain.view(self.file_dtype).reshape(self.chunk_shape)
        target[...] = values[tuple(slice(length) for length in target.shape)]
        return int(target.nbytes)

    def read_by_hdf5(self, chunk: ChunkLocation) -> int:
        """Let HDF5 read one chunk."""
        region = self.source.region(chunk)
        self.out[region] = self.source.read(chunk)
        return int(self.out[region].nbytes)


def _undo_filters(
    source: ChunkedDataset, file: SourceFile, chunk: ChunkLocation, size: int
) -> np.ndarray[Any, Any] | None:
    """The plain bytes of one chunk; None for an edge chunk that HDF5 must read.

    An edge chunk of full size may have been left unfiltered, or is damaged: HDF5 knows which.
    """
    try:
        return undo(source.filters, _stored_bytes(source, file, chunk), chunk.mask, size)
    except ValueError as problem:
        if chunk.size == size and source.at_edge(chunk):
            return None
        raise damaged(source.path, f"the chunk at {chunk.first}: {problem}") from problem


def _stored_bytes(source: ChunkedDataset, file: SourceFile, chunk: ChunkLocation) -> bytes:
    if source.direct:
        return file.read_at(chunk.offset, chunk.size)
    with hdf5_errors(source.path, "reading a chunk"):
        stored: bytes = source.dataset.id.read_direct_chunk(chunk.first)[1]
    return stored


def _label(path: Path, chunk: ChunkLocation) -> str:
    """A chunk in an error message."""
    return say("the chunk at {first} of {path}", first=list(chunk.first), path=path)


def _chunk_table(source: ChunkedDataset) -> list[ChunkLocation]:
    found: dict[tuple[int, ...], ChunkLocation] = {}

    def note(info: Any) -> None:
        if info.size and info.byte_offset is not None:
            first = tuple(info.chunk_offset)
            found[first] = ChunkLocation(first, info.byte_offset, info.size, info.filter_mask)

    each = _LOCATION + _LOCATION_AXIS * len(source.shape)
    with hdf5_errors(source.path, "locating its chunks"):
        # Counting takes HDF5 as long as locating, so chunks are counted only if there may be many.
        if source.count * each > _FEW:
            count = source.dataset.id.get_num_chunks()
            source.memory.require(count * each, say("{count} chunks of {path}", count=count, path=source.path))
        source.dataset.id.chunk_iter(note)
    for first in found:
        for start, length, step in zip(first, source.shape, source.chunk, strict=True):
            if start >= length or start % step:
                raise damaged(source.path, f"invalid chunk position {first}")
    return sorted(found.values(), key=lambda chunk: chunk.offset)


def has_fill_value(dataset: Any) -> bool:
    """Whether what was never written may be anything but zeros or empty.

    The value is not read: one of variable length is itself a reference, which may be damaged.
    """
    from h5py import h5d

    return bool(dataset.id.get_create_plist().fill_value_defined() == h5d.FILL_VALUE_USER_DEFINED)


def _fill_value(source: ChunkedDataset, out: Array) -> Any:
    with hdf5_errors(source.path, "its fill value"):
        return source.dataset.fillvalue if has_fill_value(source.dataset) else np.zeros((), out.dtype)


def slabs_of(source: ChunkedDataset, file: SourceFile, file_dtype: DType, spec: ArraySpec) -> list[Slab] | None:
    """The dataset as slabs, or None unless each chunk spans whole rows and every chunk is written."""
    if not source.direct or not spec.nbytes or source.chunk[1:] != source.shape[1:]:
        return None
    table = sorted(source.table, key=lambda chunk: chunk.first)
    if len(table) < source.count:
        return None
    row = spec.nbytes // source.shape[0]
    decoder = _SlabDecoder(source, file, file_dtype, spec, row)
    step = max(1, _TASK // (row * source.chunk[0]))
    slabs = []
    for index in range(0, len(table), step):
        batch = table[index : index + step]
        first = batch[0].first[0]
        last = min(source.shape[0], batch[-1].first[0] + source.chunk[0])
        decoding = max(map(decoder.decoding, batch))
        slabs.append(Slab(first * row, (last - first) * row, partial(decoder.decode, batch), decoding))
    return slabs


class _SlabDecoder:
    """Decodes chunks into the bytes of their rows; threads share it, it keeps no state."""

    def __init__(self, source: ChunkedDataset, file: SourceFile, file_dtype: DType, spec: ArraySpec, row: int) -> None:
        self.source, self.file, self.row = source, file, row
        self.file_dtype, self.dtype = file_dtype, spec.dtype
        inner = spec.shape[len(source.shape) :]
        self.chunk_bytes = prod((*source.chunk, *inner)) * file_dtype.itemsize

    def decoding(self, chunk: ChunkLocation) -> int:
        """Bytes of memory that decoding the chunk needs at once."""
        if self._is_plain(chunk):
            return min(_PIECE, chunk.size)
        convert = self.file_dtype != self.dtype
        return memory_to_undo(self.source.filters, chunk.size, self.chunk_bytes, convert=convert)

    def decode(self, batch: list[ChunkLocation]) -> Iterator[memoryview]:
        for chunk in batch:
            length = min(self.source.chunk[0], self.source.shape[0] - chunk.first[0]) * self.row
            if self._is_plain(chunk):
                for start in range(0, length, _PIECE):
                    count = min(_PIECE, length - start)
                    yield memoryview(self.file.read_at(chunk.offset + start, count))
                continue
            with self.source.memory.take(self.decoding(chunk), _label(self.source.path, chunk)):
                yield self._plain(chunk)[:length]

    def _is_plain(self, chunk: ChunkLocation) -> bool:
        """Whether the file stores the chunk's bytes exactly as they are in memory."""
        plain = not self.source.filters and self.file_dtype == self.dtype
        return plain and chunk.size == self.chunk_bytes

    def _plain(self, chunk: ChunkLocation) -> memoryview:
        plain = _undo_filters(self.source, self.file, chunk, self.chunk_bytes)
        if plain is None:
            return self._by_hdf5(chunk)
        if self.file_dtype == self.dtype:
            return plain.data
        return plain.view(self.file_dtype).astype(self.dtype).view(np.uint8).data

    def _by_hdf5(self, chunk: ChunkLocation) -> memoryview:
        values = self.source.read(chunk).astype(self.dtype, copy=False)
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data


DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
_NAMES = {
    4: "szip", 5: "nbit", 6: "scale-offset", 307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4",
    32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32018: "fcidecomp", 32026: "blosc2", 32029: "sperr",
}  # fmt: skip
_ROW = 256  # words whose weighted sum fits into 32 bits


@dataclass(frozen=True, slots=True)
class ChunkFilter:
    """One filter of a dataset, in the order it was applied."""

    code: int
    values: tuple[int, ...]
    name: str


def filters_of(properties: Any) -> tuple[ChunkFilter, ...]:
    """The filters of a dataset's creation properties."""
    found = []
    for index in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(index)
        shown = name.split(b"\0")[0].decode("ascii", "replace").strip()
        found.append(ChunkFilter(code, tuple(values), _NAMES.get(code) or shown or "unnamed"))
    return tuple(found)


def memory_in_hdf5(dataset: Any) -> int:
    """Bytes of memory that HDF5 itself needs to read one chunk of a dataset; 0 if it has no chunks.

    Each filter holds its input and its output; the output of deflate is up to twice too large.
    """
    if dataset.chunks is None:
        return 0
    chunk: int = prod(dataset.chunks) * dataset.id.get_type().get_size()
    filters = filters_of(dataset.id.get_create_plist())
    return chunk * (3 if any(one.code == DEFLATE for one in filters) else 2)


def require_filters(filters: tuple[ChunkFilter, ...], name: str, path: Path) -> None:
    """Refuse a dataset whose filters are not available; hdf5plugin is imported only if it may help."""
    from h5py import h5z

    missing = [one for one in filters if not h5z.filter_avail(one.code)]
    if not missing:
        return
    try:
        import hdf5plugin  # noqa: F401  registers its filters
    except ImportError:
        why, fix = say("hdf5plugin is not installed"), "pip install hdf5plugin"
    else:
        missing = [one for one in missing if not h5z.filter_avail(one.code)]
        if not missing:
            return
        why, fix = (
            say("hdf5plugin does not provide it"),
            say("install the HDF5 plugin of this filter, or rewrite the dataset with gzip"),
        )
    raise UnsupportedData(
        say(
            "{name!r} of {path} is compressed with {filter} (filter {code})",
            name=name,
            path=path,
            filter=missing[0].name,
            code=missing[0].code,
        ),
        why=say("the installed HDF5 has no such filter, and {why}", why=why),
        fix=(fix, say("load only what you need: keys=[…]")),
    )


def can_undo(filters: tuple[ChunkFilter, ...]) -> bool:
    """Whether these filters can be undone without HDF5."""
    return all(one.code in (DEFLATE, SHUFFLE, FLETCHER32) for one in filters)


def memory_to_undo(filters: tuple[ChunkFilter, ...], stored: int, size: int, *, convert: bool = False) -> int:
    """Peak bytes of memory to decode a chunk of ``stored`` bytes into ``size`` plain ones.

    Each step holds its input and its output; ``convert`` adds one step.
    """
    steps = sum(one.code in (DEFLATE, SHUFFLE) for one in filters) + convert
    steps += size % 2 and any(one.code == FLETCHER32 for one in filters)  # an odd length is copied for its checksum
    if steps == 0:
        return stored
    return stored + size if steps == 1 else max(stored + size, 2 * size)


def undo(filters: tuple[ChunkFilter, ...], stored: bytes, mask: int, size: int) -> np.ndarray[Any, Any]:
    """Decode one chunk to exactly ``size`` plain bytes; ValueError if that fails.

    Callers keep no reference to ``stored``: it is freed as soon as the first filter is undone.
    """
    applied = [one for bit, one in enumerate(filters) if not mask >> bit & 1]
    sizes = _sizes_before(applied, size)
    data: Bytes = stored
    del stored
    for one in reversed(applied):
        before = sizes.pop()
        if one.code == DEFLATE:
            data = inflate(data, before)
        elif one.code == FLETCHER32:
            data = _verified(data)
        else:
            data = _unshuffled(data, one.values[0] if one.values else 1)
    if len(data) != size:
        raise ValueError(say("the chunk has {length} bytes instead of {size}", length=len(data), size=size))
    return np.frombuffer(data, np.uint8)


def _sizes_before(applied: list[ChunkFilter], size: int) -> list[int]:
    """The input size of each filter: only fletcher32 changes the length before deflate."""
    sizes = []
    for one in applied:
        sizes.append(size)
        size += 4 if one.code == FLETCHER32 else 0
    return sizes


def _unshuffled(data: Bytes, width: int) -> memoryview:
    """Undo shuffle, which groups bytes by significance; the remainder was never moved."""
    count = len(data) // width if width > 1 else 0
    if count <= 1:
        return memoryview(data)
    whole = count * width
    grouped = np.frombuffer(data, np.uint8, whole).reshape(width, count)
    plain = np.empty(len(data), np.uint8)
    target = plain[:whole].reshape(count, width)
    for byte in range(width):  # a column at a time: two to six times as fast as one transposed copy
        target[:, byte] = grouped[byte]
    plain[whole:] = np.frombuffer(data, np.uint8)[whole:]
    return plain.data


def _verified(data: Bytes) -> memoryview:
    """The data without their checksum, after verifying it."""
    if len(data) < 4:
        raise ValueError(say("a chunk of {length} bytes is too short for its checksum", length=len(data)))
    body, tail = memoryview(data)[:-4], bytes(data[-4:])
    has = fletcher32(body)
    # HDF5 up to 1.6.2 swapped the bytes of both halves on little-endian machines.
    swapped = (has & 0xFF00FF) << 8 | (has >> 8) & 0xFF00FF
    if int.from_bytes(tail, "little") not in (has, swapped):
        raise ValueError(
            say("the chunk's checksum is {has:08x}, but the file stores {hex}", has=has, hex=tail[::-1].hex())
        )
    return body


def fletcher32(data: memoryview) -> int:
    """HDF5's Fletcher-32 over big-endian 16-bit words; an odd last byte is the high byte of a word.

    Modulo 65535, swapping a word's bytes multiplies it by 256. So the sums are taken over little-endian words, which is
    faster, and swapped at the end.
    """
    even = len(data) & ~1
    words = np.frombuffer(data[:even], "<u2")
    if even != len(data):
        words = np.append(words, np.array([data[-1]], "<u2"))
    whole = len(words) // _ROW * _ROW
    rows, tail = words[:whole].reshape(-1, _ROW), words[whole:].astype(np.uint64)
    sums = rows.sum(axis=1, dtype=np.uint64)
    # A word counts once for itself and once for every word after it.
    within = np.einsum("ij,j->i", rows, np.arange(_ROW, 0, -1, dtype=np.uint32), dtype=np.uint32)
    after = (len(words) - _ROW * np.arange(1, len(rows) + 1, dtype=np.uint64)) % 65535
    low = int(sums.sum()) + int(tail.sum())
    high = int(within.sum(dtype=np.uint64)) + int((sums * after).sum())
    high += int(np.dot(tail, np.arange(len(tail), 0, -1, dtype=np.uint64)))
    if low == 0:
        return 0
    return _swapped(high) << 16 | _swapped(low)


def _swapped(total: int) -> int:
    """Swap a sum modulo 65535 with end-around carry: a sum that is not zero never becomes zero."""
    return (256 * total - 1) % 65535 + 1
