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
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from legroom.cache import locks, manifest
from legroom.cache.locks import Lock
from legroom.cache.manifest import Array, Damaged, Dtype, Manifest, OtherReader, Table, from_json, outdated
from legroom.cache.mapped_files_and_checksums import MappedFile
from legroom.cache.store_directories import Store, store_error
from legroom.errors import EntryUnreadable, LegroomError
from legroom.formats.base_reader import ArraySpec, TableSpec
from legroom.messages import say
from legroom.records.cache_entry import Entry, EntryArray, EntryTable, EntryUser
from legroom.records.finding_and_alarm import Finding
from legroom.remote.remote_object import SourcePath, is_url

_READ = os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0)
_MOST_MANIFEST = 256 << 20
# Errors that prove that the name is absent or not a file or directory. Any other error (descriptors, memory,
# permission, the disk) proves nothing about the entry.
_NOT_A_FOLDER = (errno.ENOTDIR, errno.ELOOP)
_NOT_A_FILE = (errno.ENOENT, errno.ELOOP, errno.ENXIO)

# The leases of this process, by the inode of their lock files: all uses of one entry share a descriptor.
_leases: WeakValueDictionary[tuple[int, int], _SharedLock] = WeakValueDictionary()

NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Attached:
    """An attached entry. Its lease lives as long as any of its mappings."""

    manifest: Manifest
    root: Path
    backing: str
    arrays: Mapping[str, NDArray]
    maps: tuple[MappedFile, ...]
    tables: Mapping[str, Sequence[MappedFile]]  # the Arrow files of each table, one per shard
    lease: EntryLease
    findings: tuple[Finding, ...] = ()  # stores that were not used when it was built


@dataclass(eq=False, frozen=True, slots=True, weakref_slot=True)
class _SharedLock:
    """A lock that several leases share.

    It has no finalizer of its own: a weak reference to an object with one can still be followed while the finalizer
    runs, and would return a lock that is being closed.
    """

    lock: Lock


class EntryLease:
    """One user's share in this process's lock on an entry. The last one to be released releases the lock."""

    __slots__ = ("_held",)

    def __init__(self, held: _SharedLock) -> None:
        self._held: _SharedLock | None = held

    @property
    def lock(self) -> Lock:
        assert self._held is not None  # not released yet
        return self._held.lock

    def touch(self) -> None:
        """Set the entry's last use to now."""
        self.lock.touch()

    def release(self) -> None:
        """Release it. Calling it again does nothing."""
        self._held = None

    def __enter__(self) -> EntryLease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def lock_name(key: str) -> str:
    """The lock file of an entry."""
    return key + ".lock"


def lease(store: Store, key: str, *, create: bool = False) -> EntryLease | None:
    """Take a shared lock on the entry. None if its lock file does not exist and ``create`` is false."""
    name = lock_name(key)
    try:
        named = os.stat(name, dir_fd=store.locks, follow_symlinks=False)
        held = _leases.get((named.st_dev, named.st_ino))
        if held is not None:
            return EntryLease(held)
    except FileNotFoundError:
        pass
    try:
        lock = locks.acquire(store.locks, name, shared=True, create=create, block=True, lease=True)
    except FileNotFoundError:
        return None
    assert lock is not None  # a blocking lock is never refused
    stats = os.fstat(lock.fd)
    return EntryLease(_leases.setdefault((stats.st_dev, stats.st_ino), _SharedLock(lock)))


def attach(store: Store, key: str) -> Attached | None:
    """Map an entry. None if it does not exist.

    Raises Damaged or OtherFormat if it is unusable, EntryUnreadable if that cannot be determined.
    """
    with entry_errors(store, key):
        return _attach(store, key)


@contextmanager
def entry_errors(store: Store, key: str) -> Iterator[None]:
    """Turn a failed system call that proves nothing about the entry into EntryUnreadable."""
    try:
        yield
    except OSError as problem:
        # The builder creates a vanished store again.
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
                lock.release()  # removed by force, and perhaps rebuilt: try again
                continue
            found = _map_entry(store, key, folder, lock)
            lock.touch()
            return found
        except Damaged:
            gone = not _still_named(store, lock)
            lock.release()
            if not gone:
                raise  # else it was removed by force during the check: not damaged
        except BaseException:
            lock.release()
            raise
        finally:
            os.close(folder)


def open_entry(store: Store, key: str) -> int:
    """Open the entry's directory and check its owner and mode on the descriptor."""
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


@contextmanager
def opened_entry(store: Store, key: str) -> Iterator[int]:
    """The same for a block."""
    folder = open_entry(store, key)
    try:
        yield folder
    finally:
        os.close(folder)


def read_manifest(folder: int, key: str) -> Manifest:
    """Read the manifest in an open entry. Raises Damaged or OtherFormat if it is not valid."""
    fd, stats = _open(folder, manifest.MANIFEST_NAME)
    try:
        size = stats.st_size
        if size > _MOST_MANIFEST:
            raise Damaged(say("the manifest is larger than 256 MiB"))
        data = os.read(fd, size + 1)
    finally:
        os.close(fd)
    return from_json(data, key)


def read_usable_manifest(folder: int, key: str) -> Manifest:
    """The same; also raises OtherReader if a reader of another revision built the entry."""
    found = read_manifest(folder, key)
    if outdated(found) is not None:
        raise OtherReader(found)
    return found


def open_checked(folder: int, item: Array | Table) -> int:
    """Open a data file and compare its size, stamp and header with the manifest."""
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
            raise Damaged(say("{file} was changed or replaced after it was written", file=item.file))
        if os.pread(fd, len(header), 0) != header:
            raise Damaged(say("the header of {file} differs from its manifest", file=item.file))
    except BaseException:
        os.close(fd)
        raise
    return fd


def map_entry(store: Store, key: str, folder: int, lock: EntryLease) -> Attached:
    """Map the files of an open directory as the entry of that key, under a lease."""
    with entry_errors(store, key):
        return _map_entry(store, key, folder, lock)


def _map_entry(store: Store, key: str, folder: int, lock: EntryLease) -> Attached:
    found = read_usable_manifest(folder, key)
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
    """An array on a mapping, which it keeps alive."""
    return np.ndarray(shape, dtype, mapped.buffer(), offset)


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
            raise Damaged(say("{name} is not a regular file", name=name))
    except BaseException:
        os.close(fd)
        raise
    return fd, stats


def _ours(stats: os.stat_result, name: str) -> None:
    if stats.st_uid != os.geteuid():
        raise Damaged(say("{name} belongs to uid {uid}", name=name, uid=stats.st_uid))
    if stat.S_IMODE(stats.st_mode) & 0o022:
        raise Damaged(say("{name} is writable by other users", name=name))


def entry_exists(store: Store, key: str) -> bool:
    """Whether the entry exists. Its lock file may have been removed by hand."""
    try:
        os.stat(key, dir_fd=store.fd, follow_symlinks=False)
    except FileNotFoundError:
        return False
    return True


def _still_named(store: Store, lease: EntryLease) -> bool:
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
    paths: Sequence[SourcePath] = (),
) -> Entry:
    """The record of a stored entry. ``paths``: those by which its content was found, if any."""
    named = tuple(map(os.fspath, paths))
    return Entry(
        key=manifest.key,
        sources=manifest.paths,
        digest=manifest.digest,
        hash=manifest.hash,
        format=manifest.kind,
        backing=backing,
        bytes=manifest.nbytes,
        arrays=arrays_of(manifest.arrays),
        tables=tables_of((table.part_of or table.name, table) for table in manifest.tables),
        attributes=manifest.attributes,
        store=store,
        in_use=in_use,
        users=users,
        created=manifest.built_at,
        last_used=last_used,
        built_by=manifest.built_by,
        outdated=outdated(manifest),
        opened_as=() if set(named) <= set(manifest.paths) else named,
        versions=tuple(
            stamp for path, stamp in zip(manifest.paths, manifest.stamps, strict=True) if "://" in path and is_url(path)
        ),
    )


@lru_cache(maxsize=1024)
def _text(dtype: Dtype) -> str:
    return str(dtype)  # numpy takes longer for it than for anything else here, and thousands of arrays have the same


def arrays_of(arrays: Iterable[Array | ArraySpec]) -> dict[str, EntryArray]:
    """Arrays by name."""
    return {a.name: EntryArray(a.shape, _text(a.dtype), a.nbytes, a.attributes) for a in arrays}


def tables_of(tables: Iterable[tuple[str, Table | TableSpec]]) -> dict[str, EntryTable]:
    """Tables by name, with the shards of each combined."""
    found: dict[str, EntryTable] = {}
    for name, table in tables:
        # The first shard's order of the columns is that of all: see cached_tables.py.
        before = found.get(name, EntryTable(0, table.columns, 0, table.attributes))
        found[name] = replace(before, rows=before.rows + table.rows, bytes=before.bytes + table.nbytes)
    return found
