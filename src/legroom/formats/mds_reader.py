"""Read MosaicML MDS directories: ``index.json`` and shards, plain or compressed with gzip or zstd.

Every field of the index is checked. A column's encoding says how its bytes are read. Columns of a fixed size become
arrays: int, float, ndarray with a shape. All others are ragged bytes as they are stored, ``str`` as text; pickles stay
bytes. The hashes in the index are compared before a shard's bytes are handed out. A shard is a count, the position of
each sample, and the samples: the lengths of the columns without a fixed size, then their bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import DamagedSource, LegroomError, UnreadableSource, UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, Selection, Slab, TableSpec
from legroom.formats.decoding_memory_budget import UNLIMITED
from legroom.formats.file_reads_and_errors import (
    FolderFile,
    FolderRoot,
    SourceFile,
    are_among,
    damaged,
    packed_stamp,
    truncated,
)
from legroom.formats.fill_output_arrays import Array, DType, Progress, bytes_of
from legroom.formats.gather_byte_ranges import (
    SLAB_MEMORY,
    GrowingMemory,
    SlabReader,
    gather_ranges,
    ragged_specs,
    slabs_of_rows,
)
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

INDEX = "index.json"
MOST_SHARD = 1 << 32  # bytes: positions in a shard have 32 bits
MOST_INDEX = 256 << 20
_VERSION = 2
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_BYTES = (
    "bytes", "str_int", "str_float", "str_decimal", "pil", "jpeg", "jpeg_array", "jpegarray", "png",
    "list[pil]", "list[jpeg]", "list[png]", "pkl", "json", "ndarray",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """One column: fixed-size numbers, or bytes of any length."""

    name: str
    encoding: str
    dtype: DType | None = None  # None: bytes of any length
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int | None:
        """Bytes of each value; None: stored with each."""
        return None if self.dtype is None else prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard, as the index describes it."""

    name: str
    nbytes: int
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard: the file with its samples, and its compressed form if there is one."""

    samples: int
    raw: ShardFile
    compressed: ShardFile | None
    compression: str | None  # the algorithm, without its level


def parse_index(path: Path, text: bytes) -> tuple[list[Column], list[MdsShard]]:
    """The columns, the same in every shard, and the shards."""
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise damaged(path, f"it is not JSON: {problem}") from problem
    shards = index.get("shards") if isinstance(index, dict) else None
    if shards == []:
        raise UnsupportedData(
            say("{path} has no samples", path=path),
            why=say("its list of shards is empty"),
            fix=(say("if it is being written, wait until MDSWriter has ended: it writes the list last"),),
        )
    if not isinstance(shards, list):
        raise _not_an_index(path, say("it has no list of shards"))
    first: list[Column] | None = None
    found = []
    for number, one in enumerate(shards):
        if not isinstance(one, dict) or one.get("format") != "mds" or one.get("version") != _VERSION:
            raise _not_an_index(path, say("shard {number} is not MDS version 2", number=number))
        columns = _columns(path, number, one)
        first = first or columns
        if columns != first:
            raise UnsupportedData(
                say("the shards of {path} have different columns", path=path),
                why=say("shard {number} and shard 0 differ", number=number),
                fix=(say("write shards of the same columns into one directory"),),
            )
        found.append(_shard(path, number, one))
    assert first is not None
    return first, found


def _columns(path: Path, number: int, shard: dict[str, Any]) -> list[Column]:
    names, encodings, sizes = (shard.get(f"column_{part}") for part in ("names", "encodings", "sizes"))
    lists = [part for part in (names, encodings, sizes) if isinstance(part, list)]
    if len(lists) != 3 or len({len(part) for part in lists}) != 1 or not lists[0]:
        raise _invalid(path, number, "column_names")
    if not all(isinstance(text, str) and text for text in (*lists[0], *lists[1])) or len(set(lists[0])) < len(lists[0]):
        raise _invalid(path, number, "column_names")
    columns = []
    for name, encoding, size in zip(*lists, strict=True):
        column = _column(path, name, encoding)
        if size != column.size or type(size) is bool:
            raise damaged(
                path,
                f"column {name!r} of shard {number} has size {size}, but its encoding {encoding!r} has {column.size}",
            )
        columns.append(column)
    return columns


def _column(path: Path, name: str, encoding: str) -> Column:
    if encoding == "int":
        return Column(name, encoding, np.dtype(np.int64))
    if encoding in _NUMBERS:
        return Column(name, encoding, np.dtype(encoding))
    if encoding in _BYTES or encoding == "str":
        return Column(name, encoding)
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    lengths = shape.split(",") if shape else []
    if kind != "ndarray" or dtype not in _NUMBERS or not all(one.isdigit() and len(one) < 16 for one in lengths):
        raise UnsupportedData(
            say("column {name!r} of {path} cannot be read", name=name, path=path),
            why=say("its encoding {encoding!r} is unknown", encoding=encoding),
            fix=(say("write the column with one of MDS's own encodings"),),
        )
    if not lengths:
        return Column(name, encoding)  # each value with its own shape in front of its bytes
    if 0 in (axes := tuple(map(int, lengths))):
        raise damaged(path, f"the shape of column {name!r} is {axes}")
    return Column(name, encoding, np.dtype(dtype), axes)


def _shard(path: Path, number: int, shard: dict[str, Any]) -> MdsShard:
    samples, compression = shard.get("samples"), shard.get("compression")
    if type(samples) is not int or not 0 <= samples < MOST_SHARD or not isinstance(compression, (str, type(None))):
        raise _invalid(path, number, "samples")
    raw = _file(path, number, shard.get("raw_data"))
    if raw is None or raw.nbytes >= MOST_SHARD:
        raise _invalid(path, number, "raw_data")
    compressed = _file(path, number, shard.get("zip_data"))
    algorithm = compression.partition(":")[0] if compression else None
    return MdsShard(samples, raw, compressed if algorithm else None, algorithm)


def _file(path: Path, number: int, given: Any) -> ShardFile | None:
    if given is None:
        return None
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    name, nbytes, hashes = fields.get("basename"), fields.get("bytes"), fields.get("hashes") or {}
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")) or not name.isprintable():
        raise _invalid(path, number, "basename")
    if type(nbytes) is not int or nbytes < 0:
        raise _invalid(path, number, "bytes")
    if not isinstance(hashes, dict) or not all(isinstance(text, str) for text in hashes.values()):
        raise _invalid(path, number, "hashes")
    return ShardFile(name, nbytes, hashes)


def _invalid(path: Path, number: int, key: str) -> DamagedSource:
    return damaged(path, f"{key!r} of shard {number} is invalid")


def _not_an_index(path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("{path} is not the index of an MDS dataset", path=path),
        why=why,
        fix=(say("pass the directory that MDSWriter wrote, or one of its splits"),),
    )


_PARSED = 24  # bytes of Python objects per byte of the index
_HASHED = 1 << 20
_DTYPE = np.dtype(np.uint32)


class MdsReader(SlabReader):
    """A directory of MDS shards."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._root = FolderRoot(path)
        self._columns: dict[str, Column] = {}
        self._shards: list[_OpenedShard] = []
        self._stamps = bytearray()

    def _describe(self) -> Description:
        self._shards, self._stamps = [], bytearray()  # without what an attempt that was refused has found
        columns, shards = self._read_index()
        every = [spec.name for column in columns for spec in _specs(column, 0, 0)]
        self._columns = {
            one.name: one for one in columns if any(self.selection.takes(spec.name) for spec in _specs(one, 0, 0))
        }
        counted = GrowingMemory(self.memory, say("the list of samples in {path}", path=self.path))
        for shard in shards:
            self._shards.append(self._opened(shard, columns, counted))
        rows = sum(shard.samples for shard in shards)
        if not rows:
            raise UnsupportedData(
                say("{path} has no samples", path=self.path),
                why=say("its shards are empty"),
                fix=(say("pass the directory that MDSWriter wrote, or one of its splits"),),
            )
        specs = [
            spec
            for column in self._columns.values()
            for spec in _specs(column, rows, sum(shard.nbytes_of(column) for shard in self._shards))
            if self.selection.takes(spec.name)
        ]
        self.selection.check([spec.name for spec in specs], every, self.path)
        return Description("mds", tuple(specs), {}, (self.path,))

    def _read_index(self) -> tuple[list[Column], list[MdsShard]]:
        path = self.path / INDEX
        stats = self._root.stat(INDEX)
        if stats.st_size > MOST_INDEX:
            raise damaged(path, f"it has {stats.st_size} bytes")
        self._stamps += (stamp := packed_stamp(stats))
        with self.memory.take(_PARSED * stats.st_size, str(path)), FolderFile(self._root, INDEX, stamp) as file:
            return parse_index(path, file.read_at(0, file.size))

    def _opened(self, shard: MdsShard, columns: Sequence[Column], counted: GrowingMemory) -> _OpenedShard:
        stored = self._stored(shard)
        if not (self.path / stored.name).exists():
            raise self._missing(stored)
        stats = self._root.stat(stored.name)
        if stats.st_size != stored.nbytes:
            if stats.st_size < stored.nbytes:
                raise truncated(self.path / stored.name, stored.nbytes, stats.st_size)
            raise damaged(
                self.path / stored.name, f"it has {stats.st_size} bytes, but the index states {stored.nbytes}"
            )
        counted.add(1000)
        self._stamps += (stamp := packed_stamp(stats))
        opened = _OpenedShard(self, shard, stored, stamp)
        opened.find_values(columns, set(self._columns), counted)
        return opened

    def _missing(self, stored: ShardFile) -> UnreadableSource:
        return UnreadableSource(
            say("{path} is not complete", path=self.path),
            why=say("{index} lists the shard {name}, which is not in the directory", index=INDEX, name=stored.name),
            fix=(
                say("copy or download the directory again, with every shard in it"),
                say("if shards are meant to be missing, remove them from {index}", index=self.path / INDEX),
            ),
        )

    def _stored(self, shard: MdsShard) -> ShardFile:
        """The shard's file as it is, or the compressed one if only that is there."""
        if shard.compressed is None or (self.path / shard.raw.name).exists():
            return shard.raw
        if shard.compression not in ("gz", "zstd"):
            raise UnsupportedData(
                say("{path} is compressed with {name}", path=self.path / shard.compressed.name, name=shard.compression),
                why=say("shards are read plain, or compressed with gz or zstd"),
                fix=(say("write the dataset with MDSWriter(compression=None)"),),
            )
        return shard.compressed

    def is_listed_among(self, stamps: bytes) -> bool:
        """Whether the index and every shard have one of these stamps."""
        return are_among(self._stamps, stamps)

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        column = self._column_of(spec)
        if spec.name.endswith("/offsets") and column.dtype is None:
            return None
        slabs: list[Slab] = []
        for shard in self._shards:
            start = slabs[-1].start + slabs[-1].nbytes if slabs else 0
            slabs += shard.slabs(column, start, self._label(spec))
        return slabs

    def _read(self, spec: ArraySpec, out: Array, progress: Progress) -> None:
        if self._slabs(spec) is not None:
            super()._read(spec, out, progress)
            return
        column, row = self._column_of(spec), 0
        out[0] = 0
        for shard in self._shards:
            shard.verify()
            offsets = shard.offsets[column.name]
            np.add(offsets, out[row], out=out[row : row + len(offsets)])
            row += len(offsets) - 1
        progress(out.nbytes)

    def _column_of(self, spec: ArraySpec) -> Column:
        return self._columns[spec.name if spec.ragged is None else spec.ragged]

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        return max((shard.decoding for shard in self._shards), default=0)

    def descriptors(self) -> list[int]:
        """File descriptor of the directory."""
        return [self._root.fd]

    def _close(self) -> None:
        self._root.close()


def _specs(column: Column, rows: int, nbytes: int) -> list[ArraySpec]:
    notes = {"mds_encoding": column.encoding}
    if column.dtype is not None:
        return [ArraySpec(column.name, (rows, *column.shape), column.dtype, notes, meaning=notes)]
    return ragged_specs(column.name, rows, nbytes, text=column.encoding == "str", **notes)


class _OpenedShard:
    """One shard: where the values of its samples are."""

    def __init__(self, reader: MdsReader, shard: MdsShard, stored: ShardFile, stamp: bytes) -> None:
        self._root, self._memory = reader._root, reader.memory
        self._shard, self._stored, self._stamp = shard, stored, stamp
        self._path = reader.path / stored.name
        self._compressed = stored is shard.compressed
        self._verifying, self._verified = threading.Lock(), False
        # Of the values of each selected column: positions in the decompressed shard, and one after the other.
        self.starts: dict[str, Array] = {}
        self.offsets: dict[str, Array] = {}

    @property
    def decoding(self) -> int:
        """Bytes of memory that reading some of it takes."""
        # zlib joins its output from blocks: twice the shard for a moment.
        whole = 2 * self._shard.raw.nbytes + self._stored.nbytes if self._compressed else 0
        return whole + SLAB_MEMORY

    def nbytes_of(self, column: Column) -> int:
        """Bytes of a column."""
        return int(self.offsets[column.name][-1])

    def find_values(self, columns: Sequence[Column], selected: set[str], counted: GrowingMemory) -> None:
        """Read the samples' positions and the lengths of their values."""
        count, size = self._shard.samples, self._shard.raw.nbytes
        if 4 * (count + 2) > size:
            raise damaged(self._path, f"the index states {count} samples, more than it can hold")
        free = sum(column.size is None for column in columns)
        counted.add(8 * count * len(selected))
        # Positions, lengths, and the numbers they are computed with.
        with self._memory.take(self.decoding + count * (60 + 4 * free), str(self._path)), self._opened() as file:
            positions = np.frombuffer(file.read_at(0, 4 * (count + 2)), "<u4").astype(np.int64)
            edges = positions[1:]
            if int(positions[0]) != count:
                raise damaged(self._path, f"it has {int(positions[0])} samples, the index states {count}")
            if int(edges[0]) < 4 * (count + 2) or int(edges[-1]) != size or bool((np.diff(edges) < 4 * free).any()):
                raise damaged(self._path, "the positions of its samples are invalid")
            lengths = self._read_lengths(file, edges, free)
            self._find_starts(columns, selected, edges, lengths)

    def _read_lengths(self, file: Any, edges: Array, free: int) -> Array:
        """The lengths at the beginning of each sample, for the columns without a fixed size."""
        lengths = np.empty((len(edges) - 1, free), _DTYPE)
        if lengths.size:
            offsets = np.arange(len(edges), dtype=np.int64) * (4 * free)
            view, at = bytes_of(lengths), 0
            # One after the other: the memory of one is counted.
            for slab in slabs_of_rows(
                offsets, partial(gather_ranges, file, edges[:-1], offsets, UNLIMITED, str(self._path))
            ):
                for part in slab.decode():
                    view[at : at + len(part)] = part
                    at += len(part)
        return lengths

    def _find_starts(self, columns: Sequence[Column], selected: set[str], edges: Array, lengths: Array) -> None:
        at = edges[:-1] + 4 * lengths.shape[1]
        number = 0
        for column in columns:
            own = lengths[:, number] if column.size is None else None
            if column.name in selected:
                self.starts[column.name] = at.astype(_DTYPE)
                self._add_offsets(column, own)
            at = at + (own if own is not None else column.size)
            number += own is not None
        wrong = np.flatnonzero(at != edges[1:])
        if len(wrong):
            row = int(wrong[0])
            raise damaged(self._path,
                f"the values of sample {row} end at byte {at[row]}, the sample at byte {edges[row + 1]}"
            )  # fmt: skip

    def _add_offsets(self, column: Column, lengths: Array | None) -> None:
        size, count = self._shard.raw.nbytes, self._shard.samples
        total = int(lengths.sum(dtype=np.int64)) if lengths is not None else count * (column.size or 0)
        if total > size:
            raise damaged(self._path, f"the values of column {column.name!r} are longer than the shard")
        offsets = self.offsets[column.name] = np.zeros(count + 1, _DTYPE)
        np.cumsum(lengths if lengths is not None else np.full(count, column.size, _DTYPE), out=offsets[1:])

    def slabs(self, column: Column, start: int, what: str) -> list[Slab]:
        """The column's values in this shard, as slabs of an array in which they begin at ``start``."""
        if sys.byteorder != "little":
            raise UnsupportedData(
                say("{path} cannot be read on this machine", path=self._path),
                why=say("its numbers are little-endian, this machine is not"),
                fix=(say("convert the dataset on a little-endian machine"),),
            )
        offsets = self.offsets[column.name]
        decode = partial(self._decode, column, what)
        total = int(offsets[-1])
        if not total:
            return []
        if self._compressed:  # decompressed once per column
            return [Slab(start, total, partial(decode, 0, total), self.decoding)]
        return [
            Slab(start + one.start, one.nbytes, one.decode, self.decoding) for one in slabs_of_rows(offsets, decode)
        ]

    def _decode(self, column: Column, what: str, start: int, end: int) -> Iterator[memoryview]:
        self.verify()
        starts, offsets = self.starts[column.name], self.offsets[column.name]
        if not self._compressed:
            with self._opened() as file:
                yield from gather_ranges(file, starts, offsets, self._memory, what, start, end)
            return
        with self._memory.take(self.decoding, what), self._opened() as file:
            for part in slabs_of_rows(offsets, partial(gather_ranges, file, starts, offsets, UNLIMITED, what)):
                yield from part.decode()

    @contextmanager
    def _opened(self) -> Iterator[Any]:
        """The shard's bytes, decompressed. The caller has counted the memory."""
        with FolderFile(self._root, self._stored.name, self._stamp) as file:
            if not self._compressed:
                yield file
                return
            data = self._decompressed(file)
        yield _InMemory(data)

    def _decompressed(self, file: SourceFile) -> bytes:
        packed, size = file.read_at(0, file.size), self._shard.raw.nbytes
        _compare_hashes(self._path, self._stored.hashes, [packed])
        try:
            if self._shard.compression == "gz":
                stream = zlib.decompressobj(wbits=31)
                data = stream.decompress(packed, size + 1)
                if not stream.eof or stream.unused_data:
                    raise damaged(self._path, f"it does not decompress to the {size} bytes of the index")
            else:
                arrow = require("pyarrow", "parquet", phrase("shards compressed with zstd"))
                data = arrow.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True)
        except LegroomError:
            raise
        except Exception as problem:  # zlib.error, OSError and ValueError of pyarrow
            raise damaged(self._path, str(problem)) from problem
        if len(data) != size:
            raise damaged(self._path, f"it does not decompress to the {size} bytes of the index")
        _compare_hashes(self._path, self._shard.raw.hashes, [data])
        return data

    def verify(self) -> None:
        """Compare a plain shard with the hashes in the index, once. A compressed one is compared when it is read."""
        if self._verified or self._compressed:
            return
        with self._verifying:
            if not self._verified:
                with FolderFile(self._root, self._stored.name, self._stamp) as file:
                    blocks = (file.read_at(at, min(_HASHED, file.size - at)) for at in range(0, file.size, _HASHED))
                    _compare_hashes(self._path, self._stored.hashes, blocks)
                self._verified = True


class _InMemory:
    """A decompressed shard, read like a file; every position was compared with its size."""

    def __init__(self, data: bytes) -> None:
        self._data = memoryview(data)

    def read_at(self, offset: int, count: int) -> memoryview:
        return self._data[offset : offset + count]


def _compare_hashes(path: Path, stated: dict[str, str], blocks: Any) -> None:
    hashers = {name: _hasher(path, name) for name in stated}
    if hashers:
        for block in blocks:
            for hasher in hashers.values():
                hasher.update(block)
    for name, hasher in hashers.items():
        if hasher.hexdigest() != stated[name].lower():
            raise damaged(path, f"its {name} is {hasher.hexdigest()}, the index states {stated[name]}")


def _hasher(path: Path, name: str) -> Any:
    if name in hashlib.algorithms_available and not name.startswith("shake"):
        return hashlib.new(name, usedforsecurity=False)
    if name in ("xxh32", "xxh64", "xxh128", "xxh3_64", "xxh3_128"):
        return getattr(require("xxhash", "hash", phrase("the hashes in an MDS index")), name)()
    raise UnsupportedData(
        say("{path} cannot be verified", path=path),
        why=say("the index has a hash {name!r}, which is unknown", name=name),
        fix=(say("write the dataset with hashes=['sha1'] or ['xxh64']"),),
    )
