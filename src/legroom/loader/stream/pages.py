"""What decoding a Parquet row group takes: its largest pages and its dictionaries.

Covers: an upper bound from the footer alone where that is small enough, else from the headers of the pages, hopping
from one to the next. Does not cover: reading values.

A reader that goes page by page holds, of each column, the dictionary, one page as it is in the file and the same page
decompressed. A column chunk is never smaller than its pages, so the footer's sizes are a bound; they are far too large
a bound for large row groups, and then the page headers are asked (one small read a page).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from legroom.formats.parquet_footer import ColumnChunk, page_header
from legroom.formats.source import SourceFile
from legroom.words import say

_DICTIONARY_PAGE = 2
_HEADER = 512  # most headers are below 100 bytes; statistics of long strings make some longer
_MOST_HEADER = 1 << 20
_DICTIONARY_ENTRY = 16  # pointer and length of each string, beside its bytes


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
                entry = _DICTIONARY_ENTRY if chunk.varying else 0
                dictionary = max(dictionary, uncompressed + compressed + entries * entry)
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
