"""What a Parquet footer and the page headers say about sizes.

Covers: rows of each row group; entries, encodings, place and sizes of each column chunk, and how long its values are
unencoded where the writer noted it, which pyarrow does not show; the memory that decoding a column chunk takes.
Does not cover: anything else in the footer, which is skipped, and values.

A reader that goes page by page holds, of each column, the dictionary, one page as it is in the file and the same page
decompressed. A column chunk is never smaller than its pages, so the footer's sizes are a bound; they are far too large
a bound for large row groups, and then the page headers are read (one small read a page).

A dictionary-encoded column says nothing else about its size: a million copies of one long string take a few
bytes in the file. The footer is a Thrift struct in compact encoding; what is needed of that is below. pyarrow's
own view of column chunks is not used: on a damaged footer it ends the process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from legroom.formats.source import SourceFile
from legroom.words import say

_MOST_FOOTER = 64 << 20
_MOST_DEPTH = 32
_STOP, _TRUE, _FALSE, _BYTE, _DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = (
    0,
    1,
    2,
    3,
    7,
    8,
    9,
    10,
    11,
    12,
    13,
)


_BYTE_ARRAY = 6
_DICTIONARIES = {2, 8}
_PREFIXES = {7}  # each string after the first is what differs from the one before
_DICTIONARY_PAGE = 2
_HEADER = 512  # most headers are below 100 bytes; statistics of long strings make some longer
_MOST_HEADER = 1 << 20
_DICTIONARY_ENTRY = 16  # pointer and length of each string, beside its bytes


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group."""

    entries: int
    data: int | None  # the most its values take unencoded, without offsets; None: not known
    start: int = 0  # where its first page, a dictionary or data, begins in the file
    compressed: int = 0  # bytes of all its pages in the file
    uncompressed: int = 0
    varying: bool = False  # values of varying length: strings and bytes


def row_groups(file: SourceFile) -> list[tuple[int, list[ColumnChunk]]] | None:
    """(rows, columns) of each row group; None where the footer cannot be followed."""
    length = int.from_bytes(file.read_at(file.size - 8, 4), "little")
    if length > min(_MOST_FOOTER, file.size - 8):
        return None
    try:
        footer = _Compact(file.read_at(file.size - 8 - length, length)).struct(0)
        return [(group[3], [_chunk(chunk[3]) for chunk in group[1]]) for group in footer.get(4, [])]
    except (IndexError, KeyError, AttributeError, ValueError, TypeError):
        return None  # odd, but pyarrow may read it: what is lost is a bound, not the file


def _chunk(column: dict[int, Any]) -> ColumnChunk:
    entries, size, encodings = column[5], column[6], set(column[2])
    if min(entries, size) < 0:
        raise ValueError(say("less than nothing"))
    exact = column.get(16, {}).get(1)
    hidden = encodings & (_DICTIONARIES | _PREFIXES) or column.get(11)
    if not isinstance(exact, int) or exact < 0:
        exact = None if hidden else size
    start = min(place for place in (column[9], column.get(11)) if place)
    return ColumnChunk(entries, exact, start, column[7], size, column[1] == _BYTE_ARRAY)


def page_header(data: bytes) -> tuple[dict[int, Any], int]:
    """The page header at the beginning of ``data``, by field numbers, and its length; ValueError or IndexError
    where it is none, or longer than ``data``."""
    reader = _Compact(data)
    return reader.struct(0), reader.at


@dataclass(frozen=True, slots=True)
class Pages:
    """The largest parts of one column chunk, in bytes."""

    dictionary: int
    page: int

    @property
    def needed(self) -> int:
        return self.dictionary + self.page


def from_footer(chunks: Iterable[ColumnChunk]) -> int:
    """The most that these chunks can need, whatever their pages."""
    return sum(chunk.compressed + chunk.uncompressed * (1 + chunk.varying) for chunk in chunks)


def from_headers(file: SourceFile, chunk: ColumnChunk) -> Pages | None:
    """What the headers of the chunk's pages say; None where they cannot be followed."""
    dictionary = page = 0
    try:
        for kind, compressed, uncompressed, entries in _headers(file, chunk):
            if kind == _DICTIONARY_PAGE:
                # Strings are copied out of their page, and pointed to.
                own = uncompressed + entries * _DICTIONARY_ENTRY if chunk.varying else 0
                dictionary = max(dictionary, uncompressed + compressed + own)
            else:
                page = max(page, uncompressed + compressed)
    except (IndexError, KeyError, ValueError, TypeError, AttributeError):
        return None  # odd; pyarrow will say what is wrong, if anything is
    return Pages(dictionary, page)


def _headers(file: SourceFile, chunk: ColumnChunk) -> Iterator[tuple[int, int, int, int]]:
    """(kind, compressed, uncompressed, entries) of each page."""
    at, end = chunk.start, min(file.size, chunk.start + chunk.compressed)
    while at < end:
        fields, length = _header(file, at, end)
        compressed, uncompressed = fields[3], fields[2]
        if min(compressed, uncompressed) < 0:
            raise ValueError(say("a page of less than nothing"))
        yield fields[1], compressed, uncompressed, fields.get(7, {}).get(1, 0)
        at += length + compressed


def _header(file: SourceFile, at: int, end: int) -> tuple[dict[int, Any], int]:
    size = _HEADER
    while True:
        data = file.read_at(at, min(size, end - at))
        try:
            return page_header(data)
        except (IndexError, ValueError):
            if len(data) < size or size >= _MOST_HEADER:
                raise
        size *= 8


class _Compact:
    """Thrift's compact encoding, as dictionaries of field numbers."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self.at = 0

    def struct(self, depth: int) -> dict[int, Any]:
        fields: dict[int, Any] = {}
        number = 0
        while True:
            head = self._byte()
            kind = head & 0x0F
            if kind == _STOP:
                return fields
            number = number + (head >> 4) if head >> 4 else self._signed()
            fields[number] = kind == _TRUE if kind in (_TRUE, _FALSE) else self._value(kind, depth)

    def _value(self, kind: int, depth: int) -> Any:
        if depth > _MOST_DEPTH:
            raise ValueError(say("nested too deeply"))
        if kind in (_TRUE, _FALSE, _BYTE):  # in lists, booleans take a byte
            return self._byte()
        if kind in (4, 5, 6):
            return self._signed()
        if kind == _STRUCT:
            return self.struct(depth + 1)
        if kind in (_LIST, _SET):
            head = self._byte()
            count = self._varint() if head >> 4 == 15 else head >> 4
            if count > len(self._data):
                raise ValueError(say("a list longer than the footer"))
            return [self._value(head & 0x0F, depth + 1) for _ in range(count)]
        if kind == _MAP:
            raise ValueError(say("footers have no maps"))
        self._skip({_DOUBLE: 8, _UUID: 16}[kind] if kind != _BINARY else self._varint())
        return None

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError(say("it ends too early"))

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError(say("a number of more than 64 bits"))

    def _signed(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
