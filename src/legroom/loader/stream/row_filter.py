"""The condition on rows of a stream: read from ``filters=``, checked against the schema, applied to record batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from legroom.errors import MissingKey, UsageError
from legroom.formats.base_reader import missing_key
from legroom.messages import listed, phrase, say
from legroom.remote.object_url import SourcePath
from legroom.system.lazy_and_optional_imports import require


@dataclass(frozen=True)
class RowFilter:
    """A condition on rows, and the columns it needs."""

    expression: Any
    columns: tuple[str, ...]

    def rows(self, batch: Any) -> Any:
        """The rows of a record batch that pass, as one record batch."""
        arrow = require("pyarrow", "parquet", phrase("Arrow data"))
        kept = arrow.Table.from_batches([batch]).filter(self.expression).combine_chunks().to_batches()
        return kept[0] if kept else batch.slice(0, 0)

    def __str__(self) -> str:
        return str(self.expression)


def read_filter(filters: Any, schema: Any, where: SourcePath) -> RowFilter | None:
    """The filter, checked against the schema; None without filters."""
    if filters is None:
        return None
    expression = _expression(filters, schema, where)
    nothing = schema.empty_table()
    try:
        nothing.filter(expression)
    except Exception as problem:
        raise _refused(filters, str(problem).splitlines()[0], schema) from problem
    return RowFilter(expression, tuple(name for name in schema.names if _needs(expression, nothing, name)))


def column_error(name: str, names: Iterable[str], where: SourcePath) -> MissingKey:
    """The error for a missing column, with the nearest name."""
    found = missing_key(name, names, where)
    return MissingKey(found.what, why=found.why, fix=(*found.fix[:-1], say("omit columns to read all of them")))


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
            found = missing_key(name, schema.names, where)
            raise MissingKey(found.what, why=found.why, fix=(*found.fix[:-1], say("filter by a column of the files")))
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
