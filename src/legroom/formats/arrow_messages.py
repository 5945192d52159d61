"""The messages of an Arrow IPC file or stream, without their bodies.

Covers: how many rows there are and how many bytes each batch takes uncompressed, from the messages' headers
and, for compressed buffers, from the length that each begins with. Does not cover: values; pyarrow reads them.

The headers are flatbuffers. Four tables of the format are needed here (Message, RecordBatch,
DictionaryBatch, Buffer), few enough to read them by hand; every offset is checked against the bytes there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field

from legroom.formats.source import SourceFile, damaged
from legroom.words import say

_CONTINUATION = 0xFFFFFFFF
_DICTIONARY, _RECORDS = 2, 3
_MOST_HEADER = 1 << 28
_MAGIC = b"ARROW1\0\0"


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch of records, or one dictionary."""

    rows: int
    buffers: tuple[int, ...]  # plain bytes of each
    header: int  # bytes of its metadata
    stored: int = 0  # bytes of its body in the file
    compressed: bool = False

    @property
    def decoding(self) -> int:
        """Bytes of memory that reading it takes: the body, and beside it what it decompresses to."""
        return self.stored + (sum(self.buffers) if self.compressed else 0)


@dataclass(slots=True)
class Layout:
    """All that the messages say."""

    batches: list[Batch] = field(default_factory=list)
    dictionaries: list[Batch] = field(default_factory=list)
    replaced: bool = False  # a dictionary was replaced on the way
    schema: int = 0  # bytes of the schema's message

    @property
    def rows(self) -> int:
        return sum(batch.rows for batch in self.batches)


def read_layout(file: SourceFile) -> Layout:
    """Walk over the messages of a file or a stream, skipping the bodies."""
    layout = Layout()
    known: set[int] = set()
    try:
        for kind, header, body in _messages(file):
            if kind.kind == _RECORDS:
                layout.batches.append(_batch(file, header, kind.header, body))
            elif kind.kind == _DICTIONARY:
                table = kind.header
                number = table.number(0, "<q", 0)
                if not table.number(2, "<B", 0) and number in known:
                    layout.replaced = True
                known.add(number)
                layout.dictionaries.append(_batch(file, header, table.table(1), body))
            else:
                layout.schema = max(layout.schema, header)
    except (struct.error, IndexError, ValueError) as problem:
        raise damaged(file.path, say("an Arrow message: {problem}", problem=problem)) from problem
    return layout


@dataclass(frozen=True, slots=True)
class _Table:
    """A flatbuffer table: fields by number, each found through the table's own vtable."""

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
        place = self._field(number)
        return default if place is None else _unpack(form, self.data, place)

    def has(self, number: int) -> bool:
        return self._field(number) is not None

    def table(self, number: int) -> _Table:
        place = self._field(number)
        if place is None:
            raise ValueError(say("a part of it is missing"))
        return _Table(self.data, place + _unpack("<I", self.data, place))

    def pairs(self, number: int) -> list[tuple[int, int]]:
        """A vector of structs of two 64-bit numbers."""
        place = self._field(number)
        if place is None:
            return []
        start = place + _unpack("<I", self.data, place)
        count = _unpack("<I", self.data, start)
        if start + 4 + 16 * count > len(self.data):
            raise ValueError(say("a list in it is longer than itself"))
        return [struct.unpack_from("<qq", self.data, start + 4 + 16 * i) for i in range(count)]


@dataclass(frozen=True, slots=True)
class _Message:
    kind: int
    header: _Table


def _unpack(form: str, data: bytes, at: int) -> int:
    if at < 0:
        raise ValueError(say("an offset before its beginning"))
    return int(struct.unpack_from(form, data, at)[0])


def _messages(file: SourceFile) -> Iterator[tuple[_Message, int, int]]:
    """(message, bytes of its header, where its body begins) until the end mark or the end of the file."""
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
            raise ValueError(say("a header of {length} bytes", length=length))
        data = file.read_at(at, length)
        root = _Table(data, _unpack("<I", data, 0))
        body = root.number(3, "<q", 0)
        if body < 0:
            raise ValueError(say("a body of {body} bytes", body=body))
        at += length
        file.require(at, body)
        yield _Message(root.number(1, "<B", 0), root.table(2)), length + 8, at
        at += body


def _batch(file: SourceFile, header: int, table: _Table, body: int) -> Batch:
    rows = table.number(0, "<q", 0)
    if rows < 0:
        raise ValueError(say("{rows} rows", rows=rows))
    compressed = table.has(3)
    sizes, stored = [], 0
    for offset, length in table.pairs(2):
        if offset < 0 or length < 0:
            raise ValueError(say("a buffer before the beginning"))
        file.require(body + offset, length)
        stored = max(stored, offset + length)
        if compressed and length:
            plain = int.from_bytes(file.read_at(body + offset, 8), "little", signed=True)
            length = length - 8 if plain == -1 else plain
            if length < 0:
                raise ValueError(say("a buffer of {length} bytes", length=length))
        sizes.append(length)
    return Batch(rows, tuple(sizes), header, stored, compressed)
