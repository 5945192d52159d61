"""Datasets in the shared cache: entries, users, stores, results of removing and verifying."""

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
    """A process that maps an entry, for display only: whether an entry is in use is decided by its lock."""

    pid: int
    command: str
    privatised: int | None  # private copies of pages it wrote to; None: no permission to read


@dataclass(frozen=True, slots=True)
class Entry:
    """One dataset: in the shared cache, mapped from its source file, or read into one process."""

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
    in_use: bool | None = None  # None: not read
    users: tuple[EntryUser, ...] | None = None  # None: not read, or not visible from here
    created: float | None = None
    last_used: float | None = None
    built_by: str | None = None
    damaged: str | None = None  # why it cannot be used
    unreadable: str | None = None  # why it could not be read; no proof of damage
    versions: tuple[str, ...] = ()  # of remote sources: what their stores vouched for when they were loaded
    outdated: str | None = None  # why this version builds another one in its place
    opened_as: tuple[str, ...] = ()  # paths of the same content, if it was found by others than `sources`

    @property
    def names(self) -> tuple[str, ...]:
        """The paths to show: those that were asked for, else those it was built from."""
        return self.opened_as or self.sources


@dataclass(frozen=True, slots=True)
class StoreRoom:
    """One store of the cache, its use and free space."""

    path: str
    backing: Literal["shm", "disk"]
    size: int
    used: int  # by its entries only
    free: int  # for new entries: limited by the file system, the store's limit and the cgroup
    bound_by: str
    leftovers: int = 0  # bytes left by dead processes, which gc removes
    downloads: int = 0  # bytes of interrupted downloads, kept for the next attempt


@dataclass(frozen=True, slots=True)
class Shortfall:
    """A store with less free space than requested, after everything removable was removed."""

    store: str
    missing: int
    bound_by: str


@dataclass(frozen=True, slots=True)
class Reaped:
    """What drop or gc removed or would remove."""

    entries: tuple[Entry, ...]
    freed: int
    strays: int  # left by dead processes: incomplete directories, trash, incomplete records
    kept: tuple[Entry, ...] = ()  # requested, but in use
    dry_run: bool = False
    short: tuple[Shortfall, ...] = ()
    missing: tuple[str, ...] = ()  # names that no entry matched


@dataclass(frozen=True, slots=True)
class Verification:
    """An entry compared with its checksums, and its source with its digest."""

    entry: Entry
    damaged: tuple[str, ...]  # arrays and tables whose bytes changed since they were written
    source: Literal["same", "changed", "missing", "not-checked"]
    source_why: str = ""

    @property
    def whole(self) -> bool:
        """Whether the copy is known to be intact; a changed source file is not damage."""
        return not self.damaged and self.entry.unreadable is None
