"""Read Arrow IPC files, Arrow streams and Feather version 2 as one table.

Handles compressed batches, dictionaries, streams without an end marker, and messages without a marker, as before Arrow
0.15. Refuses streams that replace a dictionary, because an IPC file holds one dictionary per column.

Sizes come from the message headers alone; no values are read for them. The headers are flatbuffers. Only four tables
of the format are needed (Message, RecordBatch, DictionaryBatch, Buffer), so they are parsed here; every offset is
checked against the bytes available. Writing takes the memory of all dictionaries and of the largest batch.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, Selection, TableSpec
from legroom.formats.base_table_reader import (
    FILE_OVERHEAD,
    TableReader,
    arrow_errors,
    batch_overhead,
    buffer_count,
    schema_bytes,
)
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

_CONTINUATION = 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3
_MOST_HEADER = 1 << 28
_MAGIC = b"ARROW1\0\0"


class ArrowReader(TableReader):
    """An Arrow IPC file or stream."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._is_file = self._file.size >= 8 and self._file.read_at(0, 6) == b"ARROW1"
        self._names: list[str] = []
        self._memory_needed = 0
        try:
            self._arrow = require("pyarrow", "parquet", phrase("Arrow IPC"))
            with self._source() as source:
                self._whole_schema = source.schema
        except BaseException:
            self._file.close()
            raise

    def _source(self) -> Any:
        """pyarrow's reader on a file of its own, closed with it."""
        with arrow_errors(self.path, "its schema"):
            file = self._arrow.OSFile(self._file.alias, "rb")
            opener = self._arrow.ipc.open_file if self._is_file else self._arrow.ipc.open_stream
            return opener(file)

    def _describe(self) -> Description:
        self._names = self._columns(self._whole_schema)
        layout = read_layout(self._file)
        if layout.replaced:
            raise UnsupportedData(
                say("{path} replaces a dictionary within the stream", path=self.path),
                why=say("an Arrow IPC file holds one dictionary per column"),
                fix=(say("rewrite it with unified dictionaries: pyarrow.Table.unify_dictionaries()"),),
            )
        largest = max((batch.decoding for batch in layout.batches), default=0)
        self._memory_needed = largest + sum(batch.decoding for batch in layout.dictionaries)
        with arrow_errors(self.path, "its schema"):
            spec = self._spec(self._schema(), layout.rows, self._bound(layout))
        name = "arrow" if self._is_file else "arrow-stream"
        return Description(name, (spec,), dict(spec.attributes), (self.path,))

    def _schema(self) -> Any:
        fields = [self._whole_schema.field(name) for name in self._names]
        return self._arrow.schema(fields, metadata=self._whole_schema.metadata)

    def _bound(self, layout: IpcLayout) -> int:
        """Upper bound of the table's size. Counts all columns where buffers cannot be assigned to columns."""
        counts = [buffer_count(part.type) for part in self._whole_schema]
        total = sum(sum(batch.buffers) + batch.header for batch in layout.dictionaries)
        taken = set(self._names)
        for batch in layout.batches:
            total += batch.header
            if None in counts or sum(count or 0 for count in counts) != len(batch.buffers):
                total += sum(batch.buffers)
                continue
            at = 0
            for part, count in zip(self._whole_schema, counts, strict=True):
                if part.name in taken:
                    total += sum(batch.buffers[at : at + (count or 0)])
                at += count or 0
        messages = len(layout.batches) + len(layout.dictionaries)
        overhead = batch_overhead(self._whole_schema)
        return total + messages * overhead + schema_bytes(self._whole_schema) + FILE_OVERHEAD

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        return self._memory_needed

    def _batches(self) -> Iterator[Any]:
        with self._source() as source:
            for index in range(source.num_record_batches) if self._is_file else iter(int, 1):
                with arrow_errors(self.path, "its batches"):
                    if self._is_file:
                        batch = source.get_batch(index)
                    else:
                        try:
                            batch = source.read_next_batch()
                        except StopIteration:
                            return
                    # Offsets and indices come from the file, and writing follows them.
                    batch.validate(full=True)
                    batch = batch.select(self._names)
                yield batch
                del batch  # before the next one is read


@dataclass(frozen=True, slots=True)
class BatchSizes:
    """The sizes of one record batch or dictionary."""

    rows: int
    buffers: tuple[int, ...]  # uncompressed bytes of each
    header: int  # bytes of its metadata
    stored: int = 0  # bytes of its body in the file
    compressed: bool = False

    @property
    def decoding(self) -> int:
        """Bytes of memory that reading it needs: the body, and what it decompresses to."""
        return self.stored + (sum(self.buffers) if self.compressed else 0)


@dataclass(slots=True)
class IpcLayout:
    """What the message headers state."""

    batches: list[BatchSizes] = field(default_factory=list)
    dictionaries: list[BatchSizes] = field(default_factory=list)
    replaced: bool = False  # a later message replaces a dictionary

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


def read_layout(file: SourceFile) -> IpcLayout:
    """Read the message headers of a file or a stream, skipping the bodies."""
    layout = IpcLayout()
    known: set[int] = set()
    try:
        for kind, table, header, body in _messages(file):
            if kind == _RECORDS:
                layout.batches.append(_batch(file, header, table, body))
            elif kind == _DICTIONARY:
                number = table.number(0, "<q", 0)
                if not table.number(2, "<B", 0) and number in known:
                    layout.replaced = True
                known.add(number)
                layout.dictionaries.append(_batch(file, header, table.table(1), body))
    except (struct.error, IndexError, ValueError) as problem:
        raise damaged(file.path, f"an Arrow message: {problem}") from problem
    return layout


@dataclass(frozen=True, slots=True)
class _FlatTable:
    """A flatbuffer table: fields by number, located through its vtable."""

    data: bytes
    at: int

    def _field(self, number: int) -> int | None:
        table = self.at - _unpack("<i", self.data, self.at)
        size = _unpack("<H", self.data, table)
        slot = 4 + 2 * number
        if slot + 2 > size:
            return None
        offset = _unpack("<H", self.data, table + slot)
        return self.at + offset if offset else None

    def number(self, number: int, form: str, default: int) -> int:
        at = self._field(number)
        return default if at is None else _unpack(form, self.data, at)

    def has(self, number: int) -> bool:
        return self._field(number) is not None

    def table(self, number: int) -> _FlatTable:
        at = self._field(number)
        if at is None:
            raise ValueError("a required field is missing")
        return _FlatTable(self.data, at + _unpack("<I", self.data, at))

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """A vector of structs of two 64-bit integers."""
        at = self._field(number)
        if at is None:
            return []
        start = at + _unpack("<I", self.data, at)
        count = _unpack("<I", self.data, start)
        if start + 4 + 16 * count > len(self.data):
            raise ValueError("a vector is longer than the message")
        return [struct.unpack_from("<qq", self.data, start + 4 + 16 * i) for i in range(count)]


def _unpack(form: str, data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError("a negative offset")
    return int(struct.unpack_from(form, data, at)[0])


def _messages(file: SourceFile) -> Iterator[tuple[int, _FlatTable, int, int]]:
    """(kind, table, bytes of its header, offset of its body) up to the end marker or the end of the file."""
    at = 8 if file.size >= 8 and file.read_at(0, 8) == _MAGIC else 0
    while at + 4 <= file.size:
        length = int.from_bytes(file.read_at(at, 4), "little")
        at += 4
        if length == _CONTINUATION:
            length = int.from_bytes(file.read_at(at, 4), "little")
            at += 4
        if length == 0:
            return
        if length > _MOST_HEADER:
            raise ValueError(f"invalid header length: {length} bytes")
        data = file.read_at(at, length)
        root = _FlatTable(data, _unpack("<I", data, 0))
        body = root.number(3, "<q", 0)
        if body < 0:
            raise ValueError(f"invalid body length: {body} bytes")
        at += length
        file.require(at, body)
        yield root.number(1, "<B", 0), root.table(2), length + 8, at
        at += body


def _batch(file: SourceFile, header: int, table: _FlatTable, body: int) -> BatchSizes:
    rows = table.number(0, "<q", 0)
    if rows < 0:
        raise ValueError(f"invalid number of rows: {rows}")
    compressed = table.has(3)
    sizes, stored = [], 0
    for offset, length in table.pairs(2):
        if offset < 0 or length < 0:
            raise ValueError("a buffer has a negative offset or length")
        file.require(body + offset, length)
        stored = max(stored, offset + length)
        if compressed and length:
            plain = int.from_bytes(file.read_at(body + offset, 8), "little", signed=True)
            length = length - 8 if plain == -1 else plain
            if length < 0:
                raise ValueError(f"invalid buffer length: {length} bytes")
        sizes.append(length)
    return BatchSizes(rows, tuple(sizes), header, stored, compressed)
