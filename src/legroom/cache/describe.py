"""Entries as records that other layers read.

Covers: from a manifest to model.Entry. Does not cover: looking for entries (catalog.py).
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Literal

from legroom.cache.manifest import Array, Manifest, Table
from legroom.cache.npy import Dtype
from legroom.model import Entry, EntryArray, EntryTable, EntryUser


def entry_of(
    manifest: Manifest,
    backing: Any,
    *,
    store: str | None = None,
    in_use: bool | None = None,
    users: tuple[EntryUser, ...] | None = None,
    last_used: float | None = None,
) -> Entry:
    """The record of a stored entry."""
    return Entry(
        key=manifest.key,
        sources=manifest.paths,
        digest=manifest.digest,
        hash=manifest.hash,
        format=manifest.kind,
        backing=backing,
        bytes=manifest.nbytes,
        arrays=arrays_of(manifest.arrays),
        tables=tables_of(manifest.tables),
        attributes=manifest.attributes,
        store=store,
        in_use=in_use,
        users=users,
        created=manifest.built_at,
        last_used=last_used,
        built_by=manifest.built_by,
    )


@lru_cache(maxsize=1024)
def _text(dtype: Dtype) -> str:
    return str(
        dtype
    )  # numpy takes longer for it than for anything else here, and thousands of arrays have the same


def arrays_of(arrays: Iterable[Array]) -> dict[str, EntryArray]:
    """Arrays by name."""
    return {a.name: EntryArray(a.shape, _text(a.dtype), a.nbytes, a.attributes) for a in arrays}


def tables_of(tables: Iterable[Table]) -> dict[str, EntryTable]:
    """Tables by name, shards put together."""
    found: dict[str, EntryTable] = {}
    for table in tables:
        name = table.part_of or table.name
        before = found.get(name)
        rows, size = (before.rows, before.bytes) if before is not None else (0, 0)
        found[name] = EntryTable(rows + table.rows, table.columns, size + table.nbytes, table.attributes)
    return found


def unusable_entry(
    key: str,
    backing: Literal["shm", "disk"],
    store: str,
    nbytes: int,
    *,
    damaged: str | None = None,
    unreadable: str | None = None,
) -> Entry:
    """The record of a directory that has an entry's name and is damaged, or could not be read."""
    return Entry(
        key, (), None, None, "unknown", backing, nbytes, {}, {}, {},
        store=store, damaged=damaged, unreadable=unreadable,
    )  # fmt: skip
