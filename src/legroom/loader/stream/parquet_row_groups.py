"""Reads Parquet row groups in small steps; skips those in which no row passes a filter.

The filter is the condition on rows of a stream: read from ``filters=``, checked against the schema, applied to record
batches. A row group that cannot be decoded within the memory limit is refused.

Neither pre-buffering nor whole column chunks: a reader that buffers 64 kB of each column needs a few megabytes for row
groups of any size (docs/evidence/parquet-memory.md). It takes as much memory for a page as the page's header says, so
the headers are read first. Threads decode columns in parallel; each keeps memory of its own, so a small limit does
without them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from legroom.errors import MissingKey, UsageError
from legroom.formats.base_reader import missing_key
from legroom.formats.base_table_reader import arrow_errors, children, selectable, selecting_rows, without_dictionaries
from legroom.formats.file_reads_and_errors import SourceFile, damaged
from legroom.formats.parquet_reader import ColumnChunk, Pages, from_footer, from_headers, row_groups
from legroom.loader.stream.stream_memory import DecodeSteps, MemoryDivision, undecodable
from legroom.messages import listed, phrase, say
from legroom.remote.remote_object import SourcePath
from legroom.system.lazy_and_optional_imports import require
from legroom.units import format_size


@dataclass(frozen=True)
class RowFilter:
    """A condition on rows, and the columns it needs."""

    expression: Any
    columns: tuple[str, ...]

    def rows(self, batch: Any) -> Any:
        """The rows of a record batch that pass, as one record batch."""
        arrow = require("pyarrow", "parquet", phrase("Arrow data"))
        with selecting_rows():
            kept = arrow.Table.from_batches([selectable(batch)]).filter(self.expression).combine_chunks().to_batches()
        return kept[0] if kept else batch.slice(0, 0)

    def __str__(self) -> str:
        return str(self.expression)


def read_filter(filters: Any, schema: Any, where: SourcePath) -> RowFilter | None:
    """The filter, checked against the schema; None without filters."""
    if filters is None:
        return None
    expression = _expression(filters, schema, where)
    # empty_table() refuses some types: tensors with a permutation.
    nothing = require("pyarrow", "parquet", phrase("Arrow data")).Table.from_batches([], schema)
    try:
        nothing.filter(expression)
    except Exception as problem:
        raise _refused(filters, str(problem).splitlines()[0], schema) from problem
    return RowFilter(expression, tuple(name for name in schema.names if _needs(expression, nothing, name)))


def column_error(name: str, names: Iterable[str], where: SourcePath, fix: str = "") -> MissingKey:
    """The error for a missing column, with the nearest name."""
    found = missing_key(name, names, where)
    fix = fix or say("omit columns to read all of them")
    return MissingKey(found.what, why=found.why, fix=(*found.fix[:-1], fix))


def _expression(filters: Any, schema: Any, where: SourcePath) -> Any:
    compute = require("pyarrow.compute", "parquet", phrase("Arrow data"))
    if isinstance(filters, compute.Expression):
        return filters
    try:
        terms = [term for group in filters for term in (group if isinstance(group, list) else [group])]
        named = [name for name, _, _ in terms]
    except (TypeError, ValueError) as problem:
        raise _refused(filters, str(problem), schema) from problem
    for name in named:
        if name not in schema.names:
            raise column_error(name, schema.names, where, say("filter by a column of the files"))
    try:
        return require("pyarrow.parquet", "parquet", "Parquet").filters_to_expression(filters)
    except Exception as problem:
        raise _refused(filters, str(problem).splitlines()[0], schema) from problem


def _needs(expression: Any, nothing: Any, name: str) -> bool:
    """Whether the expression needs that column; Arrow has no way to list an expression's fields."""
    try:
        nothing.drop_columns([name]).filter(expression)
    except Exception:
        return True
    return False


def _refused(filters: Any, why: str, schema: Any) -> UsageError:
    return UsageError(
        say("filters={filters!r} cannot be used", filters=filters),
        why=say("{why}; the columns are {names}", why=why, names=listed(schema.names[:20])),
        fix=(
            say('write them as [("label", "==", 3), ("split", "in", ["train"])]; a list of such lists means "or"'),
            say('or as an Arrow expression: pyarrow.compute.field("label") == 3'),
        ),
    )


_BUFFER = 64 << 10
_MOST_FOOTER = 512 << 10  # bytes; parsing it in Python takes a second per megabyte
_PROBE_ROWS = 64


def read_schema(path: Path) -> tuple[Any, list[int]]:
    """The schema, and the rows of each row group."""
    with arrow_errors(path, say("its footer")), _open(path) as table:
        metadata = table.metadata
        counts = [metadata.row_group(index).num_rows for index in range(metadata.num_row_groups)]
        if sum(counts) != metadata.num_rows or min(counts, default=0) < 0:
            raise damaged(path, say("its row groups do not add up to {rows} rows", rows=metadata.num_rows))
        return table.schema_arrow, counts


def groups_worth_reading(path: Path, expression: Any, groups: set[int]) -> set[int]:
    """The row groups of a Parquet file that may hold a row that passes, by their statistics.

    Rows are filtered one by one as well: statistics only rule out whole groups.
    """
    dataset = require("pyarrow.dataset", "parquet", "Parquet")
    arrow = require("pyarrow", "parquet", "Parquet")
    with arrow_errors(path, say("the statistics of its row groups")), SourceFile(path) as file:
        fragment = dataset.ParquetFileFormat().make_fragment(file.for_arrow(arrow))
        kept = fragment.subset(expression, schema=fragment.physical_schema).row_groups
        return {group.id for group in kept} & groups


def _open(path: Path) -> Any:
    arrow = require("pyarrow", "parquet", "Parquet")
    parquet = require("pyarrow.parquet", "parquet", "Parquet")
    with SourceFile(path) as file:
        opened = file.for_arrow(arrow)
    return parquet.ParquetFile(opened, pre_buffer=False, buffer_size=_BUFFER, page_checksum_verification=True)


@lru_cache(maxsize=2)
def _footer(path: Path, size: int, changed: int) -> list[tuple[int, list[ColumnChunk]]] | None:
    """Every column chunk in the footer; None where the footer is too long or cannot be parsed.

    Cached, because every epoch opens the same files; ``size`` and ``changed`` identify the version of a file.
    """
    with SourceFile(path) as file:
        length = int.from_bytes(file.read_at(size - 8, 4), "little")
        return None if length > _MOST_FOOTER else row_groups(file)


@lru_cache(maxsize=1024)
def _pages(path: Path, size: int, changed: int, chunk: ColumnChunk) -> Pages | None:
    """The page headers of a chunk; cached like the footer, because a large file has thousands of them."""
    with SourceFile(path) as file:
        return from_headers(file, chunk)


class ParquetSource:
    """An open Parquet file; owns its file descriptors until it is closed."""

    def __init__(self, path: Path, columns: Sequence[str], steps: DecodeSteps, threads: bool) -> None:
        self.path = path
        self._columns, self._steps, self._threads = list(columns), steps, threads
        self._file = SourceFile(path)
        try:
            with arrow_errors(path, say("its footer")):
                self._table = _open(path)
                schema = self._table.schema_arrow
                self._leaves = _leaves(schema, self._columns)
                self._nested = {field.name for field in schema if children(field.type)}
            self._version = self._file.size, os.stat(path).st_mtime_ns
            self._groups = _footer(path, *self._version)
        except BaseException:
            self._file.close()
            raise

    def read(self, group: int, division: MemoryDivision) -> Iterator[Any]:
        """The rows of one row group from its first to its last, a step at a time."""
        doing = say("row group {group}", group=group)
        self._require_fits(group, division)
        with arrow_errors(self.path, doing):
            source = self._iterate(group, self._steps.rows(self._row_bytes(group)))
        while True:
            with arrow_errors(self.path, doing):
                batch = next(source, None)
            if batch is None:
                return
            self._steps.read(batch.get_total_buffer_size())
            yield batch

    def row_bytes(self, group: int) -> int | None:
        """Average bytes of a row, by the footer; None where the footer does not contain them."""
        if self._groups is None:
            return None
        rows, _ = self._groups[group]
        total = 0
        for name, chunks in self._chunks(group).items():
            sizes = [leaf_bytes(leaf.kind, chunk) for leaf, chunk in zip(self._leaves[name], chunks, strict=True)]
            if None in sizes:
                return None
            total += sum(size or 0 for size in sizes)
            if name in self._nested:
                total += 8 * rows  # the offsets of lists
        return -(-total // max(1, rows))

    def close(self) -> None:
        self._table.close(force=True)
        self._file.close()

    def _row_bytes(self, group: int) -> int:
        known = self.row_bytes(group)
        if known is not None:
            return known
        # With dictionaries the footer does not show how long values are: read some.
        probe = next(self._iterate(group, _PROBE_ROWS))
        return 2 * int(probe.nbytes) // max(1, int(probe.num_rows))

    def _iterate(self, group: int, rows: int) -> Any:
        return self._table.iter_batches(
            batch_size=rows, row_groups=[group], columns=self._columns, use_threads=self._threads
        )

    def _chunks(self, group: int) -> dict[str, list[ColumnChunk]]:
        """The column chunks behind each column that is read."""
        if self._groups is None:
            return {}
        _, every = self._groups[group]
        return {name: [every[leaf.number] for leaf in leaves] for name, leaves in self._leaves.items()}

    def _require_fits(self, group: int, division: MemoryDivision) -> None:
        """Read the headers of all pages: one that is longer than its column is damage, too long ones are refused."""
        chunks = self._chunks(group)
        found = {name: [_pages(self.path, *self._version, chunk) for chunk in own] for name, own in chunks.items()}
        if from_footer(chunk for own in chunks.values() for chunk in own) <= division.decode:
            return
        needs: dict[str, tuple[int, int]] = {}
        for name, every in found.items():
            pages = [one for one in every if one is not None]
            needs[name] = sum(page.dictionary for page in pages), sum(page.page for page in pages)
        needed = sum(map(sum, needs.values()))
        if needed > division.decode:
            name, (dictionary, page) = max(needs.items(), key=lambda item: sum(item[1]))
            raise undecodable(
                say("row group {group} of {path}", group=group, path=self.path),
                needed,
                division,
                say(
                    "pages and dictionaries of {count} columns, most of it {name!r}: dictionary {dictionary}, "
                    "largest page {page}",
                    count=len(needs),
                    name=name,
                    dictionary=format_size(dictionary),
                    page=format_size(page),
                ),
                say(
                    "or write the file with smaller pages and dictionaries: pyarrow.parquet.write_table(…, "
                    "data_page_size=1 << 20, dictionary_pagesize_limit=1 << 20)"
                ),
            )


class _Leaf(NamedTuple):
    """A stored column: which one of the file, and the type of its values."""

    number: int
    kind: Any


def _leaves(schema: Any, columns: Sequence[str]) -> dict[str, list[_Leaf]]:
    """The stored columns behind each column that is read."""
    found, at = {}, 0
    for field in schema:
        kinds = _leaf_kinds(field.type)
        if field.name in columns:
            found[field.name] = [_Leaf(at + number, kind) for number, kind in enumerate(kinds)]
        at += len(kinds)
    return found


def leaf_count(schema: Any) -> int:
    """How many stored columns a schema has."""
    return sum(len(_leaf_kinds(field.type)) for field in schema)


def _leaf_kinds(kind: Any) -> list[Any]:
    inner = children(kind)
    return [leaf for child in inner for leaf in _leaf_kinds(child)] if inner else [without_dictionaries(kind)]


def leaf_bytes(kind: Any, chunk: ColumnChunk) -> int | None:
    """Bytes of a column chunk's values in memory; None where the footer does not contain them."""
    try:
        width = int(kind.bit_width)
    except ValueError:  # strings and bytes: each with an offset or a view
        return None if chunk.data is None else chunk.data + 16 * chunk.entries
    return (chunk.entries * (width + 1) + 7) // 8
