"""Read Parquet files as one table, in batches of a few megabytes whatever the size of the row groups.

``nbytes`` is an upper bound from the footer: entries times width for fixed widths. For strings it is the writer's count
of unencoded bytes, or the encoded size where no dictionary or prefix encoding hides repetition. If an older writer left
no count for a dictionary-encoded column, that column is read once to measure it.

Reading page by page holds, for each column, its dictionary, one stored page and the same page decompressed. The sizes
of column chunks in the footer bound that. For large row groups this bound is far too high: the page headers are read.

The footer is a Thrift struct in compact encoding and is parsed here: pyarrow does not expose the unencoded sizes, and
its own view of column chunks ends the process on a damaged footer.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.formats.base_reader import ArraySpec, Description, Selection, TableSpec
from legroom.formats.base_table_reader import (
    FILE_OVERHEAD,
    LeafColumn,
    TableReader,
    arrow_errors,
    batch_overhead,
    children,
    column_bound,
    schema_bytes,
    without_dictionaries,
)
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.system.lazy_and_optional_imports import require

_BATCH_BYTES = 4 << 20
_MOST_ROWS = 1 << 16
_BATCHES = 12  # in flight at once, including what Arrow's allocator keeps: 20 to 50 MB measured
_SMALL = _BATCHES * _BATCH_BYTES  # column chunks of a row group that may be in memory as a whole
_BUFFER = 1 << 16
_READING = {"pre_buffer": False, "page_checksum_verification": True}
_MOST_FOOTER = 64 << 20
_MOST_DEPTH = 32
# Types of Thrift's compact encoding.
_STOP, _TRUE, _FALSE, _BYTE = 0, 1, 2, 3
_DOUBLE, _BINARY, _LIST, _SET, _MAP, _STRUCT, _UUID = 7, 8, 9, 10, 11, 12, 13
_BYTE_ARRAY = 6
_DICTIONARIES = {2, 8}
_PREFIXES = {7}  # each string is stored as its difference from the previous one
_DICTIONARY_PAGE = 2
_HEADER = 512  # most headers are below 100 bytes; statistics of long strings make some longer
_MOST_HEADER = 1 << 20
_DICTIONARY_ENTRY = 16  # pointer and length of each string, besides its bytes


class ParquetReader(TableReader):
    """A Parquet file."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        try:
            parquet = require("pyarrow.parquet", "parquet", "Parquet")
            with arrow_errors(path, "its footer"):
                self._table = parquet.ParquetFile(self._arrow_file(), **_READING)
                self._whole_schema = self._table.schema_arrow
                self._metadata = self._table.metadata
        except BaseException:
            self._file.close()
            raise
        self._names: list[str] = []
        self._batch_rows = 1
        self._groups: list[tuple[int, list[ColumnChunk]]] | None = None
        self._memory_of_pages: int | None = None  # known when it is chosen how they are read

    def _arrow_file(self) -> Any:
        return self._file.for_arrow(require("pyarrow", "parquet", "Parquet"))

    def _describe(self) -> Description:
        self._names = self._columns(self._whole_schema)
        rows = self._metadata.num_rows
        groups = self._groups = row_groups(self._file)
        if groups is not None and sum(count for count, _ in groups) != rows:
            raise damaged(self.path, f"its row groups do not add up to {rows} rows")
        with arrow_errors(self.path, "the sizes of its columns"):
            data = sum(self._column_sizes(groups).values())
            self._batch_rows = max(1, min(_MOST_ROWS, _BATCH_BYTES * rows // max(1, data)))
            schema = self._schema()
            # Batches end with their row group; pyarrow may split them, so twice as many are assumed.
            batches = 2 * (rows // self._batch_rows + self._metadata.num_row_groups + 1)
            nbytes = data + batches * batch_overhead(schema) + schema_bytes(schema) + FILE_OVERHEAD
            spec = self._spec(schema, rows, nbytes)
        return Description("parquet", (spec,), dict(spec.attributes), (self.path,))

    def _schema(self) -> Any:
        arrow = require("pyarrow", "parquet", "Parquet")
        fields = [self._whole_schema.field(name) for name in self._names]
        return arrow.schema(
            [part.with_type(without_dictionaries(part.type)) for part in fields], metadata=self._whole_schema.metadata
        )

    def _column_sizes(self, groups: list[tuple[int, list[ColumnChunk]]] | None) -> dict[str, int]:
        """Upper bound of the bytes of each selected column."""
        leaves = iter(()) if groups is None else self._leaves(groups)
        sizes: dict[str, int] = {}
        for part in self._whole_schema:
            own = [next(leaves, None) for _ in range(_leaf_count(part.type))]
            if part.name not in self._names:
                continue
            known = iter([leaf for leaf in own if leaf is not None])
            size = column_bound(without_dictionaries(part.type), known) if None not in own else None
            sizes[part.name] = self._counted(part.name) if size is None else size
        return sizes

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """One page and the dictionary of every column of the largest row group, and the batches in flight."""
        self._choose_reading()
        return _BATCHES * _BATCH_BYTES + (self._memory_of_pages or 0)

    def _choose_reading(self) -> None:
        """Read page by page where whole column chunks would take much memory.

        pyarrow then takes as much memory for a page as its header says, before it reads the page: so the headers are
        read first. In a column chunk that is in memory, it notices by itself that a page is longer.
        """
        if self._memory_of_pages is not None:
            return
        groups = [self._chunks(index) for index in range(len(self._groups or ()))]
        self._memory_of_pages = max(map(from_footer, groups), default=0)
        if self._groups is not None and self._memory_of_pages <= _SMALL:
            return
        self._memory_of_pages = max(map(self._from_headers, groups), default=0)
        parquet = require("pyarrow.parquet", "parquet", "Parquet")
        with arrow_errors(self.path, "its footer"):
            self._table.close(force=True)
            self._table = parquet.ParquetFile(
                self._arrow_file(), metadata=self._metadata, buffer_size=_BUFFER, **_READING
            )

    def _from_headers(self, chunks: list[ColumnChunk]) -> int:
        found = [from_headers(self._file, chunk) for chunk in chunks]
        return from_footer(chunks) if None in found else sum(pages.needed for pages in found if pages is not None)

    def _chunks(self, group: int) -> list[ColumnChunk]:
        """The column chunks of one row group that are read."""
        assert self._groups is not None
        _, chunks = self._groups[group]
        taken: list[ColumnChunk] = []
        first = 0
        for part in self._whole_schema:
            count = _leaf_count(part.type)
            taken += chunks[first : first + count] if part.name in self._names else []
            first += count
        return taken

    def _leaves(self, groups: list[tuple[int, list[ColumnChunk]]]) -> Iterator[LeafColumn]:
        """What the footer states about each stored column."""
        for index in range(self._metadata.num_columns):
            chunks = [columns[index] for _, columns in groups if index < len(columns)]
            sizes = [chunk.data for chunk in chunks]
            known = len(chunks) == len(groups) and None not in sizes
            data = sum(size or 0 for size in sizes) if known else None
            yield LeafColumn(sum(chunk.entries for chunk in chunks), data)

    def _counted(self, name: str) -> int:
        """Read one column and measure it."""
        self._choose_reading()
        kind = without_dictionaries(self._whole_schema.field(name).type)
        batches = self._table.iter_batches(batch_size=1024, columns=[name], use_threads=False)
        return sum(int(batch.column(name).cast(kind).nbytes) + 64 for batch in batches)

    def _batches(self) -> Iterator[Any]:
        arrow = require("pyarrow", "parquet", "Parquet")
        schema = self._schema()
        self._choose_reading()
        with arrow_errors(self.path, "its pages"):
            source = self._table.iter_batches(batch_size=self._batch_rows, columns=self._names)
        while True:
            with arrow_errors(self.path, "its pages"):
                batch = next(source, None)
                if batch is None:
                    return
                columns = [
                    batch.column(part.name) if batch.schema.field(part.name).type == part.type
                    else batch.column(part.name).cast(part.type)
                    for part in schema
                ]  # fmt: skip
                checked = arrow.RecordBatch.from_arrays(columns, schema=schema)
                checked.validate()
                del batch, columns
            yield checked
            del checked

    def _close(self) -> None:
        self._table.close(force=True)
        super()._close()


def _leaf_count(kind: Any) -> int:
    """How many stored columns a type has."""
    inner = children(kind)
    return sum(_leaf_count(child) for child in inner) if inner else 1


@dataclass(frozen=True, slots=True)
class ColumnChunk:
    """One column of one row group."""

    entries: int
    data: int | None  # upper bound of its unencoded values, without offsets; None: unknown
    start: int = 0  # offset of its first page (dictionary or data) in the file
    compressed: int = 0  # bytes of all its pages in the file
    uncompressed: int = 0
    varying: bool = False  # values of varying length: strings and bytes


def row_groups(file: SourceFile) -> list[tuple[int, list[ColumnChunk]]] | None:
    """(rows, columns) of each row group; None if the footer cannot be parsed."""
    length = int.from_bytes(file.read_at(file.size - 8, 4), "little")
    if length > min(_MOST_FOOTER, file.size - 8):
        return None
    try:
        footer = _Compact(file.read_at(file.size - 8 - length, length)).struct(0)
        return [(group[3], [_chunk(chunk[3]) for chunk in group[1]]) for group in footer.get(4, [])]
    except (IndexError, KeyError, AttributeError, ValueError, TypeError):
        return None  # pyarrow may still read the file: only the bound is lost


def _chunk(column: dict[int, Any]) -> ColumnChunk:
    entries, size, encodings = column[5], column[6], set(column[2])
    if min(entries, size) < 0:
        raise ValueError("negative size")
    exact = column.get(16, {}).get(1)
    hidden = encodings & (_DICTIONARIES | _PREFIXES) or column.get(11)
    if not isinstance(exact, int) or exact < 0:
        exact = None if hidden else size
    start = min(offset for offset in (column[9], column.get(11)) if offset)
    return ColumnChunk(entries, exact, start, column[7], size, column[1] == _BYTE_ARRAY)


@dataclass(frozen=True, slots=True)
class Pages:
    """The largest dictionary and page of one column chunk, in bytes."""

    dictionary: int
    page: int

    @property
    def needed(self) -> int:
        return self.dictionary + self.page


def from_footer(chunks: Iterable[ColumnChunk]) -> int:
    """Upper bound of the memory that these chunks need, whatever their pages."""
    return sum(chunk.compressed + chunk.uncompressed * (1 + chunk.varying) for chunk in chunks)


def from_headers(file: SourceFile, chunk: ColumnChunk) -> Pages | None:
    """Sizes from the headers of the chunk's pages; None if they cannot be parsed."""
    dictionary = page = 0
    try:
        for kind, compressed, uncompressed, entries in _headers(file, chunk):
            if kind == _DICTIONARY_PAGE:
                # Strings are copied out of their page, with a pointer each.
                own = uncompressed + entries * _DICTIONARY_ENTRY if chunk.varying else 0
                dictionary = max(dictionary, uncompressed + compressed + own)
            else:
                page = max(page, uncompressed + compressed)
    except (IndexError, KeyError, ValueError, TypeError, AttributeError):
        return None  # pyarrow raises the error, if there is one
    return Pages(dictionary, page)


def _headers(file: SourceFile, chunk: ColumnChunk) -> Iterator[tuple[int, int, int, int]]:
    """(kind, compressed, uncompressed, entries) of each page."""
    at, end = chunk.start, min(file.size, chunk.start + chunk.compressed)
    while at < end:
        fields, length = _header(file, at, end)
        compressed, uncompressed = fields[3], fields[2]
        if min(compressed, uncompressed) < 0:
            raise ValueError("negative page size")
        if compressed > chunk.compressed:
            raise damaged(file.path, f"a page at byte {at} is longer than its column")
        yield fields[1], compressed, uncompressed, fields.get(7, {}).get(1, 0)
        at += length + compressed


def _header(file: SourceFile, at: int, end: int) -> tuple[dict[int, Any], int]:
    size = _HEADER
    while True:
        data = file.read_at(at, min(size, end - at))
        try:
            reader = _Compact(data)
            return reader.struct(0), reader.at
        except (IndexError, ValueError):
            if len(data) < size or size >= _MOST_HEADER:
                raise
        size *= 8


class _Compact:
    """A decoder of Thrift's compact encoding; structs become dictionaries of field numbers."""

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
            raise ValueError("nested too deeply")
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
                raise ValueError("list longer than the footer")
            return [self._value(head & 0x0F, depth + 1) for _ in range(count)]
        if kind == _MAP:
            raise ValueError("unexpected map")
        self._skip({_DOUBLE: 8, _UUID: 16}[kind] if kind != _BINARY else self._varint())
        return None

    def _byte(self) -> int:
        self.at += 1
        return self._data[self.at - 1]

    def _skip(self, count: int) -> None:
        self.at += count
        if self.at > len(self._data):
            raise ValueError("truncated")

    def _varint(self) -> int:
        value = shift = 0
        while True:
            byte = self._byte()
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                return value
            shift += 7
            if shift > 63:
                raise ValueError("integer of more than 64 bits")

    def _signed(self) -> int:
        value = self._varint()
        return value >> 1 ^ -(value & 1)
