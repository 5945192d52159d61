"""Datasets in the shared cache.

Covers: entries, their users, their stores, what was removed or checked. Does not cover: how they lie there (cache).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, slots=True)
class EntryArray:
    """One array of an entry."""

    shape: tuple[int, ...]
    dtype: str
    bytes: int
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntryTable:
    """One table of an entry."""

    rows: int
    columns: Mapping[str, str]  # name → Arrow type
    bytes: int
    attributes: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EntryUser:
    """A process that has an entry mapped, for showing to people: a lock, not this, says that it is in use."""

    pid: int
    command: str
    privatised: int | None  # bytes it has written to and so holds for itself; None: may not be looked at


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset: in the shared cache, mapped where it lies, or read into one process."""

    key: str | None  # None: not in a store
    sources: tuple[str, ...]
    digest: str | None
    hash: str | None
    format: str  # of the source
    backing: Literal["shm", "disk", "inplace", "memory"]
    bytes: int
    arrays: Mapping[str, EntryArray]
    tables: Mapping[str, EntryTable]
    attributes: Mapping[str, object]
    store: str | None = None  # the store's directory
    in_use: bool | None = None  # None: not looked at
    users: tuple[EntryUser, ...] | None = None  # None: not looked at, or they cannot be seen from here
    created: float | None = None
    last_used: float | None = None
    built_by: str | None = None
    damaged: str | None = None  # why it cannot be used
    unreadable: str | None = None  # why it could not be read, which proves no damage


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """One store of the cache, and its room."""

    path: str
    backing: Literal["shm", "disk"]
    size: int
    used: int  # by its entries alone
    free: int  # for new entries: bounded by the file system, the store's limit and the cgroup
    bound_by: str


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A store that has less room than was asked for, with everything gone that may go."""

    store: str
    missing: int
    bound_by: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """What a drop or a gc removed, or would remove."""

    entries: tuple[Entry, ...]
    freed: int
    strays: int  # what dead processes left: half-built directories, trash, half-written records
    kept: tuple[Entry, ...] = ()  # wanted, and in use
    dry_run: bool = False
    short: tuple[Shortfall, ...] = ()


@dataclass(frozen=True, slots=True)
class Verification:
    """An entry compared with its checksums, and its source with its digest."""

    entry: Entry
    damaged: tuple[str, ...]  # arrays and tables whose bytes are not what was written
    source: Literal["same", "changed", "missing", "not-checked"]
    source_why: str = ""

    @property
    def whole(self) -> bool:
        """Whether the copy is what was written; a source that changed since is no damage."""
        return not self.damaged
