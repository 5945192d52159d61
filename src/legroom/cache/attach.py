"""Open an entry for use: take its lease, check its files, map them.

The order matters: shared lock, open the directory, check that the lock file still has its name. A process removes an
entry under the exclusive lock or, when forced, removes the lock file's name as well. So an entry that passes all
three checks can no longer be dropped as unused. Attaching takes a few system calls, whatever the size.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

import numpy as np

from legroom.cache import locks, manifest
from legroom.cache.locks import Lock
from legroom.cache.manifest import Array, Damaged, Dtype, Manifest, Table, from_json
from legroom.cache.mapped_files import MappedFile
from legroom.cache.store import Store, store_error
from legroom.errors import EntryUnreadable, LegroomError
from legroom.model import Entry, EntryArray, EntryTable, EntryUser, Finding
from legroom.words import say

_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_CLOEXEC", 0)
_MOST_MANIFEST = 256 << 20
# What a refused open proves: the name is not there, or is not a file or directory. Anything else (descriptors,
# memory, permission, the disk) says nothing about the entry.
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)

# The leases of this process, by the inode of their lock files: those who use one entry share a descriptor.
_leases: WeakValueDictionary[tuple[int, int], _SharedLock] = WeakValueDictionary()

NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Attached:
    """An entry in use. The lease lives as long as any of the maps does."""

    manifest: Manifest
    root: Path
    backing: str
    arrays: Mapping[str, NDArray]
    maps: tuple[MappedFile, ...]
    tables: Mapping[str, Sequence[MappedFile]]  # the Arrow files of each table, one a shard
    lease: Lease | None
    findings: tuple[Finding, ...] = ()  # which places were passed over when it was built

    def path(self, item: Array | Table) -> Path:
        """The file of one array or table."""
        return self.root / self.manifest.key / item.file


@dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class _SharedLock:
    """A lock that several leases share.

    It has no finalizer of its own: a weak reference to an object with one can still be followed while it runs, and
    would lead to a lock that is being closed.
    """

    lock: Lock


class Lease:
    """One user's share in this process's lock on an entry; the lock goes with the last of them."""

    __slots__ = ("_held",)

    def __init__(self, held: _SharedLock) -> None:
        self._held: _SharedLock | None = held

    @property
    def lock(self) -> Lock:
        assert self._held is not None  # it was given back
        return self._held.lock

    def touch(self) -> None:
        """Note the moment as the entry's last use."""
        self.lock.touch()

    def release(self) -> None:
        """Give it back; a second time does nothing."""
        self._held = None

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_name(key: str) -> str:
    """The lock file of an entry."""
    return key + ".lock"


def lease(store: Store, key: str, *, create: bool = False) -> Lease | None:
    """A shared lock on the entry; None where there has never been one (and it is not to be created)."""
    name = lock_name(key)
    try:
        named = os.stat(name, dir_fd=store.locks, follow_symlinks=False)
        held = _leases.get((named.st_dev, named.st_ino))
        if held is not None:
            return Lease(held)
    except FileNotFoundError:
        pass
    try:
        lock = locks.acquire(store.locks, name, shared=True, create=create, block=True, lease=True)
    except FileNotFoundError:
        return None
    assert lock is not None  # a blocking lock is never refused
    stats = os.fstat(lock.fd)
    return Lease(_leases.setdefault((stats.st_dev, stats.st_ino), _SharedLock(lock)))


def attach(store: Store, key: str) -> Attached | None:
    """Map an entry; None where it is not there.

    Raises Damaged or OtherFormat where it cannot be used, EntryUnreadable where that is not known.
    """
    with entry_errors(store, key):
        return _attach(store, key)


@contextmanager
def entry_errors(store: Store, key: str) -> Iterator[None]:
    """Turn a system call that failed on an entry, and proves nothing about it, into EntryUnreadable."""
    try:
        yield
    except OSError as problem:
        # A store that vanished is the builder's to make anew.
        if isinstance(problem, (LegroomError, FileNotFoundError)):
            raise
        raise store_error(problem, EntryUnreadable, store.root / key) from problem


def _attach(store: Store, key: str) -> Attached | None:
    while True:
        lock = lease(store, key) or (lease(store, key, create=True) if entry_exists(store, key) else None)
        if lock is None:
            return None
        try:
            folder = open_entry(store, key)
        except FileNotFoundError:
            lock.release()
            return None
        except BaseException:
            lock.release()
            raise
        try:
            if not _still_named(store, lock):
                lock.release()  # removed by force, and perhaps built anew: look again
                continue
            found = map_entry(store, key, folder, lock)
            lock.touch()
            return found
        except Damaged:
            gone = not _still_named(store, lock)
            lock.release()
            if not gone:
                raise  # else it was taken away by force while it was looked at: no damage
        except BaseException:
            lock.release()
            raise
        finally:
            os.close(folder)


def open_entry(store: Store, key: str) -> int:
    """The entry's directory, checked on its descriptor."""
    flags = _READ | getattr(os, "O_DIRECTORY", 0)
    try:
        folder = os.open(key, flags, dir_fd=store.fd)
    except OSError as problem:
        if problem.errno not in _NOT_A_FOLDER:
            raise
        raise Damaged(say("{key} is not a directory: {why}", key=key, why=problem.strerror)) from problem
    try:
        _ours(os.fstat(folder), key)
    except BaseException:
        os.close(folder)
        raise
    return folder


def read_manifest(folder: int, key: str) -> Manifest:
    """The manifest in an open entry; Damaged or OtherFormat where it is not one of ours."""
    fd, stats = _open(folder, manifest.MANIFEST_NAME)
    try:
        size = stats.st_size
        if size > _MOST_MANIFEST:
            raise Damaged(say("the manifest is too large to be one"))
        data = os.read(fd, size + 1)
    finally:
        os.close(fd)
    return from_json(data, key)


def open_checked(folder: int, item: Array | Table) -> int:
    """A data file's descriptor, its size and header compared with the manifest."""
    fd, stats = _open(folder, item.file)
    try:
        header = item.header if isinstance(item, Array) else b""
        if stats.st_size != len(header) + item.nbytes:
            raise Damaged(
                say(
                    "{file} has {size} bytes, {expected} expected",
                    file=item.file,
                    size=stats.st_size,
                    expected=len(header) + item.nbytes,
                )
            )
        if manifest.stamp_of(stats) != item.stamp:
            raise Damaged(say("{file} was changed or replaced after it had been written", file=item.file))
        if os.pread(fd, len(header), 0) != header:
            raise Damaged(say("{file} has another header than its manifest says", file=item.file))
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_entry(store: Store, key: str, folder: int, lock: Lease) -> Attached:
    """Map what lies in an open directory, as the entry of that key, under a lease."""
    with entry_errors(store, key):
        return _map_entry(store, key, folder, lock)


def _map_entry(store: Store, key: str, folder: int, lock: Lease) -> Attached:
    found = read_manifest(folder, key)
    arrays: dict[str, NDArray] = {}
    maps: list[MappedFile] = []
    for array in found.arrays:
        fd = open_checked(folder, array)
        try:
            start = len(array.header)
            mapped = MappedFile(fd, start + array.nbytes, lock)
        finally:
            os.close(fd)
        maps.append(mapped)
        arrays[array.name] = array_view(mapped, array.shape, array.dtype, start)
    tables: dict[str, list[MappedFile]] = {}
    for table in found.tables:
        fd = open_checked(folder, table)
        try:
            # Now, not at first use: by then the name may be gone, and only what is mapped keeps its pages.
            tables.setdefault(table.part_of or table.name, []).append(MappedFile(fd, table.nbytes, lock))
        finally:
            os.close(fd)
    return Attached(found, store.root, store.backing, arrays, tuple(maps), tables, lock)


def array_view(mapped: MappedFile, shape: tuple[int, ...], dtype: np.dtype[Any], offset: int) -> NDArray:
    """An array on a map, which it keeps alive."""
    array: NDArray = np.ndarray(shape, dtype, mapped.buffer(), offset)
    array.flags.writeable = mapped.writable
    return array


def _open(folder: int, name: str) -> tuple[int, os.stat_result]:
    try:
        fd = os.open(name, _READ | getattr(os, "O_NONBLOCK", 0), dir_fd=folder)
    except OSError as problem:
        if problem.errno not in _NOT_A_FILE:
            raise
        raise Damaged(f"{name}: {problem.strerror}") from problem
    try:
        stats = os.fstat(fd)
        _ours(stats, name)
        if not stat.S_ISREG(stats.st_mode):
            raise Damaged(say("{name} is no file", name=name))
    except BaseException:
        os.close(fd)
        raise
    return fd, stats


def _ours(stats: os.stat_result, name: str) -> None:
    if stats.st_uid != os.geteuid():
        raise Damaged(say("{name} belongs to uid {uid}", name=name, uid=stats.st_uid))
    if stat.S_IMODE(stats.st_mode) & 0o022:
        raise Damaged(say("{name} may be written by others", name=name))


def entry_exists(store: Store, key: str) -> bool:
    """Whether there is an entry; its lock file may have been removed by hand."""
    try:
        os.stat(key, dir_fd=store.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _still_named(store: Store, lease: Lease) -> bool:
    try:
        named = os.stat(lease.lock.name, dir_fd=store.locks, follow_symlinks=False)
    except FileNotFoundError:
        return False
    held = os.fstat(lease.lock.fd)
    return (named.st_dev, named.st_ino) == (held.st_dev, held.st_ino)


def entry_record(
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


def unusable_entry_record(
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
