"""Arrow types: what they take in an IPC file, and how many buffers and columns they are made of.

Covers: upper bounds from types and counts. Does not cover: reading anything.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from legroom.system.imports import require
from legroom.words import say

FILE_OVERHEAD = 4096  # magic numbers, end marks, and slack
_BUFFER = 16 + 64 + 16  # its place in the header, the padding after it, one offset more than rows
_BATCH = 512 + 24 + 64  # a message's frame, its block in the footer, padding


def batch_overhead(schema: Any) -> int:
    """What a batch takes beside its buffers' bytes, at most."""
    fields = sum(1 for part in schema for _ in every_type(part.type))
    return _BATCH + fields * (16 + 3 * _BUFFER)


def schema_bytes(schema: Any) -> int:
    """What the schema takes: once at the beginning, once in the footer."""
    return 2 * int(schema.serialize().size)


def every_type(kind: Any) -> Iterator[Any]:
    """The type and all types within it."""
    yield kind
    for child in children(kind):
        yield from every_type(child)


def children(kind: Any) -> list[Any]:
    """The types a nested type is made of."""
    types = require("pyarrow", "parquet", say("Arrow data")).types
    if isinstance(kind, require("pyarrow", "parquet", say("Arrow data")).BaseExtensionType):
        return [kind.storage_type]
    if types.is_dictionary(kind):
        return []
    return [kind.field(index).type for index in range(kind.num_fields)]


def plain(kind: Any) -> Any:
    """The type without dictionaries: an IPC file allows one dictionary a column, and row groups have many."""
    arrow = require("pyarrow", "parquet", say("Arrow data"))
    if arrow.types.is_dictionary(kind):
        return plain(kind.value_type)
    if arrow.types.is_struct(kind):
        return arrow.struct([part.with_type(plain(part.type)) for part in kind])
    for test, make in ((arrow.types.is_list, arrow.list_), (arrow.types.is_large_list, arrow.large_list)):
        if test(kind):
            return make(kind.value_field.with_type(plain(kind.value_type)))
    return kind


def buffer_count(kind: Any) -> int | None:
    """How many buffers a column of that type has in an IPC batch; None where it depends on the data."""
    types = require("pyarrow", "parquet", say("Arrow data")).types
    if types.is_union(kind) or types.is_run_end_encoded(kind) or "view" in str(kind):
        return None
    inner = [buffer_count(child) for child in children(kind)]
    if None in inner:
        return None
    below = sum(count or 0 for count in inner)
    if isinstance(kind, require("pyarrow", "parquet", say("Arrow data")).BaseExtensionType):
        return below
    if types.is_null(kind):
        return 0
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1 + below
    if types.is_nested(kind):  # lists, large lists, maps: validity and offsets
        return 2 + below
    varying = types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind)
    return 3 if varying or types.is_large_binary(kind) else 2


@dataclass(frozen=True, slots=True)
class Leaf:
    """What is known of one stored column: entries, and bytes where they vary (None: not known)."""

    entries: int
    data: int | None


def bound(kind: Any, leaves: Iterator[Leaf]) -> int | None:
    """The most bytes that a column of ``kind`` takes; draws its leaves in order. None: cannot be told.

    No level of a nested column has more elements than its leaf has entries, for every element shows as at
    least one; only fixed-size lists multiply, a missing one takes its whole room.
    """
    taken, _ = _bound(kind, leaves, 1)
    return taken


def _bound(kind: Any, leaves: Iterator[Leaf], times: int) -> tuple[int | None, int]:
    """(bytes, entries)."""
    arrow = require("pyarrow", "parquet", say("Arrow data"))
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _bound(kind.storage_type, leaves, times)
    if types.is_nested(kind):
        inner = times * kind.list_size if types.is_fixed_size_list(kind) else times
        parts = [_bound(child, leaves, max(1, inner)) for child in children(kind)]
        if not parts or any(part is None for part, _ in parts):
            return None, 0
        entries = max(count for _, count in parts)
        own = _validity(entries * times) + (0 if types.is_struct(kind) else 8 * (entries * times + 1))
        return sum(part or 0 for part, _ in parts) + own, entries
    leaf = next(leaves)
    count = leaf.entries * times
    if types.is_null(kind):
        return 0, leaf.entries
    width = _bits(kind)
    if width is not None:
        return (count * width + 7) // 8 + _validity(count), leaf.entries
    if leaf.data is None:
        return None, leaf.entries
    return leaf.data + 16 * (count + 1) + _validity(count), leaf.entries  # offsets of 4 or 8, views of 16


def _validity(count: int) -> int:
    return (count + 7) // 8


def _bits(kind: Any) -> int | None:
    try:
        return int(kind.bit_width)
    except ValueError:  # strings and bytes
        return None
