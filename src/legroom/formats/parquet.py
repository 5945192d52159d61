"""Parquet files as one table.

Covers: flat and nested columns, any row groups, memory bounded by a few megabytes whatever the row groups'
size. Does not cover: encrypted files, and directories of many Parquet files.

``nbytes`` is an upper bound from the footer: entries times width for fixed widths, the writer's own count of
unencoded bytes for strings, their encoded size where no dictionary or prefix hides repetition. Where an older
writer left no count for a dictionary-encoded column, that column is streamed through once and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legroom.formats.arrow_types import (
    FILE_OVERHEAD,
    Leaf,
    batch_overhead,
    bound,
    children,
    plain,
    schema_bytes,
)
from legroom.formats.parquet_footer import ColumnChunk, from_footer, from_headers, row_groups
from legroom.formats.protocol import ArraySpec, Description, TableSpec
from legroom.formats.selection import Selection
from legroom.formats.source import damaged
from legroom.formats.table import TableReader, arrow_trouble
from legroom.system.imports import require
from legroom.words import say

_BATCH_BYTES = 4 << 20
_MOST_ROWS = 1 << 16
_BATCHES = 12  # on their way at once, with what Arrow's allocator keeps: measured, 20 to 50 MB


class ParquetReader(TableReader):
    """A Parquet file."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        try:
            parquet = require("pyarrow.parquet", "parquet", "Parquet")
            with arrow_trouble(path, say("its footer")):
                # Neither pre-buffering nor whole column chunks in memory: page by page.
                self._table = parquet.ParquetFile(
                    self._arrow_file(), pre_buffer=False, buffer_size=1 << 16, page_checksum_verification=True
                )
                self._whole_schema = self._table.schema_arrow
                self._metadata = self._table.metadata
        except BaseException:
            self._file.close()
            raise
        self._names: list[str] = []
        self._batch_rows = 1
        self._groups: list[tuple[int, list[ColumnChunk]]] | None = None
        self._memory_needed: int | None = None

    def _arrow_file(self) -> Any:
        # Given a name, pyarrow would look for a filesystem by its scheme.
        return require("pyarrow", "parquet", "Parquet").OSFile(self._file.alias, "rb")

    def _look(self) -> Description:
        self._names = self._columns(self._whole_schema)
        rows = self._metadata.num_rows
        groups = self._groups = row_groups(self._file)
        if groups is not None and sum(count for count, _ in groups) != rows:
            raise damaged(self.path, say("its row groups do not add up to {rows} rows", rows=rows))
        with arrow_trouble(self.path, say("the sizes of its columns")):
            data = sum(self._column_sizes(groups).values())
            self._batch_rows = max(1, min(_MOST_ROWS, _BATCH_BYTES * rows // max(1, data)))
            schema = self._schema()
            # Batches end with their row group; twice as many is room for those pyarrow splits.
            batches = 2 * (rows // self._batch_rows + self._metadata.num_row_groups + 1)
            nbytes = data + batches * batch_overhead(schema) + schema_bytes(schema) + FILE_OVERHEAD
            spec = self._spec(schema, rows, nbytes)
        return Description("parquet", (spec,), dict(spec.attributes), (self.path,))

    def _schema(self) -> Any:
        arrow = require("pyarrow", "parquet", "Parquet")
        fields = [self._whole_schema.field(name) for name in self._names]
        return arrow.schema(
            [part.with_type(plain(part.type)) for part in fields], metadata=self._whole_schema.metadata
        )

    def _column_sizes(self, groups: list[tuple[int, list[ColumnChunk]]] | None) -> dict[str, int]:
        """The most that each column asked for takes."""
        leaves = iter(()) if groups is None else self._leaves(groups)
        sizes: dict[str, int] = {}
        for part in self._whole_schema:
            own = [next(leaves, None) for _ in range(_leaf_count(part.type))]
            if part.name not in self._names:
                continue
            known = iter([leaf for leaf in own if leaf is not None])
            size = bound(plain(part.type), known) if None not in own else None
            sizes[part.name] = self._counted(part.name) if size is None else size
        return sizes

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """Of every column at once a page and the dictionary, of some row group, and a few batches on their way."""
        if self._memory_needed is None:
            pages = max(map(self._pages, range(len(self._groups))), default=0) if self._groups else 0
            self._memory_needed = _BATCHES * _BATCH_BYTES + pages
        return self._memory_needed

    def _pages(self, group: int) -> int:
        """What the pages of the columns asked for take in one row group, by the footer where that says little."""
        assert self._groups is not None
        _, chunks = self._groups[group]
        taken: list[ColumnChunk] = []
        first = 0
        for part in self._whole_schema:
            count = _leaf_count(part.type)
            taken += chunks[first : first + count] if part.name in self._names else []
            first += count
        bound = from_footer(taken)
        if bound <= _BATCHES * _BATCH_BYTES:
            return bound
        found = [from_headers(self._file, chunk) for chunk in taken]
        return bound if None in found else sum(pages.needed for pages in found if pages is not None)

    def _leaves(self, groups: list[tuple[int, list[ColumnChunk]]]) -> Iterator[Leaf]:
        """What the footer says of each stored column."""
        for index in range(self._metadata.num_columns):
            chunks = [columns[index] for _, columns in groups if index < len(columns)]
            sizes = [chunk.data for chunk in chunks]
            known = len(chunks) == len(groups) and None not in sizes
            data = sum(size or 0 for size in sizes) if known else None
            yield Leaf(sum(chunk.entries for chunk in chunks), data)

    def _counted(self, name: str) -> int:
        """Stream one column and count."""
        kind = plain(self._whole_schema.field(name).type)
        batches = self._table.iter_batches(batch_size=1024, columns=[name], use_threads=False)
        return sum(int(batch.column(name).cast(kind).nbytes) + 64 for batch in batches)

    def _batches(self) -> Iterator[Any]:
        arrow = require("pyarrow", "parquet", "Parquet")
        schema = self._schema()
        with arrow_trouble(self.path, say("its pages")):
            source = self._table.iter_batches(batch_size=self._batch_rows, columns=self._names)
        while True:
            with arrow_trouble(self.path, say("its pages")):
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
    """How many stored columns a type takes."""
    inner = children(kind)
    return sum(_leaf_count(child) for child in inner) if inner else 1
