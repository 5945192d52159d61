"""Read MosaicML MDS directories: ``index.json`` and shards, plain or compressed with gzip or zstd.

Columns of a fixed size become arrays: int, float, ndarray with a shape. All others are ragged bytes as they are stored,
``str`` as text; pickles stay bytes. The hashes in the index are compared before a shard's bytes are handed out. A
shard is a count, the position of each sample, and the samples: the lengths of the columns without a fixed size, then
their bytes.
"""

from __future__ import annotations

import hashlib
import sys
import threading
import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import LegroomError, UnreadableSource, UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Selection, Slab, TableSpec
from legroom.formats.decoding_memory_budget import UNLIMITED
from legroom.formats.file_reads_and_errors import SourceFile, damaged, truncated
from legroom.formats.fill_arrays import Array, Progress, bytes_of
from legroom.formats.gather_byte_ranges import (
    SLAB_MEMORY,
    GrowingMemory,
    gather_ranges,
    ragged_specs,
    read_slabs,
    slabs_of_rows,
)
from legroom.formats.mds_index import INDEX, MOST_INDEX, Column, MdsShard, ShardFile, parse_index
from legroom.formats.refuse_changed_folder_files import FolderFile, FolderRoot, are_among, packed_stamp, unpacked_stamp
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

_PARSED = 24  # bytes of Python objects per byte of the index
_HASHED = 1 << 20
_DTYPE = np.dtype(np.uint32)


class MdsReader(BaseReader):
    """A directory of MDS shards."""

    _accounts_memory = True

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._root = FolderRoot(path)
        self._columns: dict[str, Column] = {}
        self._shards: list[_OpenedShard] = []
        self._stamps = bytearray()

    def _describe(self) -> Description:
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
            raise damaged(path, say("it has {size} bytes", size=stats.st_size))
        self._stamps += packed_stamp(stats)
        stamp = unpacked_stamp(self._stamps, 0)
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
                self.path / stored.name,
                say("it has {has} bytes, but the index states {needed}", has=stats.st_size, needed=stored.nbytes),
            )
        counted.add(1000)
        self._stamps += packed_stamp(stats)
        opened = _OpenedShard(self, shard, stored, unpacked_stamp(packed_stamp(stats), 0))
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

    def _extent(self, spec: ArraySpec) -> Extent | None:
        return None

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
        slabs = self._slabs(spec)
        if slabs is not None:
            read_slabs(slabs, out, progress)
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
        return [ArraySpec(column.name, (rows, *column.shape), column.dtype, notes)]
    return ragged_specs(column.name, rows, nbytes, text=column.encoding == "str", **notes)


class _OpenedShard:
    """One shard: where the values of its samples are."""

    def __init__(self, reader: MdsReader, shard: MdsShard, stored: ShardFile, stamp: tuple[int, ...]) -> None:
        self._root, self._memory = reader._root, reader.memory
        self._shard, self._stored, self._stamp = shard, stored, stamp
        self._path = reader.path / stored.name
        self._compressed = stored is shard.compressed
        self._verified = threading.Lock(), [False]
        # Of the values of each selected column: positions in the decompressed shard, and one after the other.
        self.starts: dict[str, Array] = {}
        self.offsets: dict[str, Array] = {}

    @property
    def decoding(self) -> int:
        """Bytes of memory that reading some of it takes."""
        # zlib joins its output from blocks: twice the shard for a moment.
        whole = 2 * self._shard.raw.nbytes + self._stored.nbytes if self._compressed else 0
        return whole + SLAB_MEMORY

    @property
    def _what(self) -> str:
        return str(self._path)

    def nbytes_of(self, column: Column) -> int:
        """Bytes of a column."""
        return int(self.offsets[column.name][-1])

    def find_values(self, columns: Sequence[Column], selected: set[str], counted: GrowingMemory) -> None:
        """Read the samples' positions and the lengths of their values."""
        count, size = self._shard.samples, self._shard.raw.nbytes
        if 4 * (count + 2) > size:
            raise self._damaged(say("the index states {count} samples, more than it can hold", count=count))
        free = sum(column.size is None for column in columns)
        counted.add(8 * count * len(selected))
        # Positions, lengths, and the numbers they are computed with.
        with self._memory.take(self.decoding + count * (60 + 4 * free), self._what), self._opened() as file:
            if self._compressed:
                self._verified[1][0] = True  # compared while it was decompressed
            positions = np.frombuffer(file.read_at(0, 4 * (count + 2)), "<u4").astype(np.int64)
            edges = positions[1:]
            if int(positions[0]) != count:
                raise self._damaged(
                    say("it has {has} samples, the index states {count}", has=int(positions[0]), count=count)
                )
            if int(edges[0]) < 4 * (count + 2) or int(edges[-1]) != size or bool((np.diff(edges) < 4 * free).any()):
                raise self._damaged(say("the positions of its samples are invalid"))
            lengths = self._read_lengths(file, edges, free)
            self._find_starts(columns, selected, edges, lengths)

    def _read_lengths(self, file: Any, edges: Array, free: int) -> Array:
        """The lengths at the beginning of each sample, for the columns without a fixed size."""
        lengths = np.empty((len(edges) - 1, free), _DTYPE)
        if lengths.size:
            offsets = np.arange(len(edges), dtype=np.int64) * (4 * free)
            for slab in slabs_of_rows(
                offsets, partial(gather_ranges, file, edges[:-1], offsets, UNLIMITED, self._what)
            ):
                at = slab.start
                view = bytes_of(lengths)
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
            raise self._damaged(
                say(
                    "the values of sample {row} end at byte {has}, the sample at byte {needed}",
                    row=row, has=int(at[row]), needed=int(edges[row + 1]),
                )
            )  # fmt: skip

    def _add_offsets(self, column: Column, lengths: Array | None) -> None:
        size, count = self._shard.raw.nbytes, self._shard.samples
        total = int(lengths.sum(dtype=np.int64)) if lengths is not None else count * (column.size or 0)
        if total > size:
            raise self._damaged(say("the values of column {name!r} are longer than the shard", name=column.name))
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
        yield _InMemory(self._path, data)

    def _decompressed(self, file: SourceFile) -> bytes:
        packed, size = file.read_at(0, file.size), self._shard.raw.nbytes
        _compare_hashes(self._path, self._stored.hashes, [packed])
        try:
            if self._shard.compression == "gz":
                stream = zlib.decompressobj(wbits=31)
                data = stream.decompress(packed, size + 1)
                if not stream.eof or stream.unused_data:
                    raise self._damaged(say("it does not decompress to the {size} bytes of the index", size=size))
            else:
                arrow = require("pyarrow", "parquet", phrase("shards compressed with zstd"))
                data = arrow.Codec("zstd").decompress(packed, decompressed_size=size, asbytes=True)
        except LegroomError:
            raise
        except Exception as problem:  # zlib.error, OSError and ValueError of pyarrow
            raise self._damaged(str(problem)) from problem
        if len(data) != size:
            raise self._damaged(say("it does not decompress to the {size} bytes of the index", size=size))
        _compare_hashes(self._path, self._shard.raw.hashes, [data])
        return data

    def verify(self) -> None:
        """Compare a plain shard with the hashes in the index, once. A compressed one is compared when it is read."""
        lock, done = self._verified
        if done[0] or self._compressed:
            return
        with lock:
            if not done[0]:
                with FolderFile(self._root, self._stored.name, self._stamp) as file:
                    blocks = (file.read_at(at, min(_HASHED, file.size - at)) for at in range(0, file.size, _HASHED))
                    _compare_hashes(self._path, self._stored.hashes, blocks)
                done[0] = True

    def _damaged(self, why: str) -> LegroomError:
        return damaged(self._path, why)


class _InMemory:
    """A decompressed shard, read like a file."""

    def __init__(self, path: Path, data: bytes) -> None:
        self.path, self.size, self._data = path, len(data), memoryview(data)

    def read_at(self, offset: int, count: int) -> memoryview:
        if offset + count > self.size:
            raise truncated(self.path, offset + count, self.size)
        return self._data[offset : offset + count]


def _compare_hashes(path: Path, stated: dict[str, str], blocks: Any) -> None:
    hashers = {name: _hasher(path, name) for name in stated}
    if hashers:
        for block in blocks:
            for hasher in hashers.values():
                hasher.update(block)
    for name, hasher in hashers.items():
        if hasher.hexdigest() != stated[name].lower():
            raise damaged(
                path,
                say(
                    "its {name} is {has}, the index states {needed}",
                    name=name,
                    has=hasher.hexdigest(),
                    needed=stated[name],
                ),
            )


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
