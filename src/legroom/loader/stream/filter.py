"""Filters of a stream: which rows are wanted.

Covers: the lists of (column, operator, value) that pyarrow.parquet.read_table takes, and Arrow expressions; the
columns a filter looks at; leaving out row groups whose statistics rule every row out. Does not cover: reading.

Rows are always filtered one by one as well: statistics only say which groups need not be read.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.errors import MissingKey, UsageError
from legroom.formats.selection import missing_key
from legroom.formats.table_reader import arrow_errors
from legroom.system.imports import require
from legroom.words import listed, say


@dataclass(frozen=True)
class Filter:
    """A condition on rows, and the columns it needs."""

    expression: Any
    columns: tuple[str, ...]

    def rows(self, batch: Any) -> Any:
        """The rows of a record batch that pass, as one record batch."""
        arrow = require("pyarrow", "parquet", say("Arrow data"))
        kept = arrow.Table.from_batches([batch]).filter(self.expression).combine_chunks().to_batches()
        return kept[0] if kept else batch.slice(0, 0)

    def __str__(self) -> str:
        return str(self.expression)


def read_filter(filters: Any, schema: Any, where: Path) -> Filter | None:
    """A filter as given, checked against the data's schema; None where nothing is filtered."""
    if filters is None:
        return None
    expression = _expression(filters, schema, where)
    nothing = schema.empty_table()
    try:
        nothing.filter(expression)
    except Exception as problem:
        raise _refused(filters, str(problem).splitlines()[0], schema) from problem
    return Filter(expression, tuple(name for name in schema.names if _looks_at(expression, nothing, name)))


def column_error(name: str, names: Iterable[str], where: Path) -> MissingKey:
    """The error for a column that is not there, with the nearest name."""
    found = missing_key(name, names, where)
    return MissingKey(
        found.what, why=found.why, fix=(*found.fix[:-1], say("leave columns out to take all of them"))
    )


def _expression(filters: Any, schema: Any, where: Path) -> Any:
    compute = require("pyarrow.compute", "parquet", say("Arrow data"))
    if isinstance(filters, compute.Expression):
        return filters
    try:
        terms = [term for group in filters for term in (group if isinstance(group, list) else [group])]
        named = [name for name, _, _ in terms]
    except (TypeError, ValueError) as problem:
        raise _refused(filters, str(problem), schema) from problem
    for name in named:
        if name not in schema.names:
            raise column_error(name, schema.names, where)
    try:
        return require("pyarrow.parquet", "parquet", "Parquet").filters_to_expression(filters)
    except Exception as problem:
        raise _refused(filters, str(problem).splitlines()[0], schema) from problem


def _looks_at(expression: Any, nothing: Any, name: str) -> bool:
    """Whether the expression cannot do without that column; Arrow does not say what an expression refers to."""
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
            say(
                'write them like [("label", "==", 3), ("split", "in", ["train"])], lists of such lists mean "or"'
            ),
            say('or as an Arrow expression: pyarrow.compute.field("label") == 3'),
        ),
    )


def groups_worth_reading(path: Path, expression: Any, groups: set[int]) -> set[int]:
    """The row groups of a Parquet file that may hold a row that passes, by their statistics."""
    dataset = require("pyarrow.dataset", "parquet", "Parquet")
    local = require("pyarrow.fs", "parquet", "Parquet").LocalFileSystem()
    with arrow_errors(path, say("the statistics of its row groups")):
        fragment = dataset.ParquetFileFormat().make_fragment(str(path), filesystem=local)
        kept = fragment.subset(expression, schema=fragment.physical_schema).row_groups
        return {group.id for group in kept} & groups
