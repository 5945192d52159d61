"""A builder's private directory in a store: its lock, its reservation, its files.

The lock file ``building-<id>.lock`` is created before the directory ``building-<id>`` and removed after it, both in
``work/`` and under the store's lock. So a directory whose lock no process holds belongs to a dead builder.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Iterator
from dataclasses import replace

from legroom.cache import eviction, locks, store_free_space
from legroom.cache.eviction import evict_until_fits
from legroom.cache.locks import Lock
from legroom.cache.mapped_files_and_checksums import HugePages, opened
from legroom.cache.store_directories import (
    BUILDING,
    LOCK,
    WORK,
    Store,
    delete_leftovers,
    delete_trash,
    in_memory,
    move_to_trash,
    step,
    store_lock,
)
from legroom.cache.store_free_space import directory_bytes, keep_count
from legroom.errors import NoRoom
from legroom.formats.decoding_memory_budget import Allowed
from legroom.system.file_writes import write_all

_CREDIT = 16 << 20
_NEW = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
FULL = (errno.ENOSPC, errno.EDQUOT)  # no space, or no inode


class StagingDirectory:
    """The private directory of one running build."""

    def __init__(self, store: Store, need: store_free_space.BuildNeed, *, evict: bool) -> None:
        """Reserve ``need`` in the store. Raises NoRoom if it does not fit."""
        self.store, self.need = store, need
        self.ident = secrets.token_hex(8)
        self.name = BUILDING + self.ident
        self.folder = store.root / WORK / self.name
        self._counting = threading.Lock()  # writing threads check it too
        self._credit = 0  # bytes that may be allocated before the limits are read again
        self._large = HugePages()
        self._evict = evict
        self.lock_file = self.name + LOCK
        self.fd = -1
        step("work")
        try:
            self._begin()
        except OSError as problem:
            self.raise_if_full(problem)
            raise

    def _begin(self) -> None:
        store = self.store
        with store_lock(store):
            delete_leftovers(store)
            lock = locks.acquire(store.work, self.lock_file)
            assert lock is not None  # the name is random and new
            self._lock: Lock = lock
            try:
                step("reserve")
                self._reserve(self.need)
                os.mkdir(self.name, 0o700, dir_fd=store.work)
                self.fd = os.open(self.name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=store.work)
            except BaseException:
                try:
                    self._clear()
                except OSError:
                    pass  # as in close()
                finally:
                    self._release()
                raise

    def _reserve(self, need: store_free_space.BuildNeed) -> None:
        """Reserve everything, of which ``need`` is still to be written. Call it under the store's lock."""
        try:
            store_free_space.check_fits(self.store, need, mine=self.lock_file, evicts=self._evict)
        except NoRoom:
            if not self._evict:
                raise
            eviction.remove_unused_downloads(self.store)
            evict_until_fits(self.store, need, mine=self.lock_file)
            store_free_space.check_fits(self.store, need, mine=self.lock_file, evicts=self._evict)
        store_free_space.write_reservation(self._lock.fd, self.need.nbytes, 0, 0)

    def reserve_more(self, nbytes: int) -> None:
        """Reserve this many bytes in all: the size of what is written was an estimate. Raises NoRoom."""
        with store_lock(self.store):
            self.need = replace(self.need, nbytes=nbytes)
            left = nbytes - directory_bytes(self.store.work, self.name)
            self._reserve(replace(self.need, nbytes=max(0, left), files=0))

    def report_progress(self, done: int, total: int) -> None:
        """Write the progress for the processes that wait."""
        store_free_space.write_reservation(self._lock.fd, self.need.nbytes, done, total)

    def create(self, name: str) -> int:
        """Create a file in the private directory. The caller closes the descriptor."""
        return os.open(name, _NEW, 0o600, dir_fd=self.fd)

    def allocate(self, fd: int, header: bytes, size: int, *, later: bool = False) -> Iterator[tuple[int, bool]]:
        """Allocate a file in steps and write its header. Yields (end, whether blocks are allocated).

        With ``later``, for files in memory that are written and not mapped, small pages are left to the write. It
        allocates them or fails, and allocating them first would only clear them twice. The writer then calls
        ``check_capacity`` itself.
        """
        try:
            os.ftruncate(fd, size)
            for offset in range(0, size, store_free_space.STEP):
                length = min(store_free_space.STEP, size - offset)
                self.check_capacity(length)
                there = in_memory(self.store) and self._large.take(fd, offset, length)
                if not later:
                    store_free_space.allocate_blocks(fd, offset, length)
                if offset == 0:
                    os.pwrite(fd, header, 0)
                yield offset + length, there or not later
        except OSError as problem:
            self.raise_if_full(problem)
            raise

    def check_capacity(self, count: int) -> None:
        """Check the limits again before ``count`` bytes are allocated. Raises NoRoom if they no longer fit."""
        with self._counting:
            if count <= self._credit:
                self._credit -= count
                return
            free = store_free_space.check_now(self.store, count, self.need)
            # One reading of the cgroup is good for some megabytes: thousands of small arrays need not read it each.
            self._credit = min(_CREDIT, (free - count) // 8)

    def decoding_allowance(self) -> Allowed:
        """What decoding may allocate now, in addition to the data still to be written to a store in memory."""
        taken = directory_bytes(self.store.work, self.name)
        return store_free_space.decoding_allowance(max(0, self.need.nbytes - taken) if in_memory(self.store) else 0)

    def fills_memory(self) -> bool:
        """Whether the files on a disk are larger than the memory that is free now beside decoding."""
        return store_free_space.fills_memory(self.store, self.need)

    def write_sealed(self, name: str, data: memoryview | bytes) -> os.stat_result:
        """Write a file, read-only and, on a disk, durable. Returns its stat."""
        with opened(name, _NEW, 0o600, dir_fd=self.fd) as fd:
            write_all(fd, data, 0)
            return self._seal(fd)

    def _seal(self, fd: int) -> os.stat_result:
        os.fchmod(fd, 0o400)
        if self.store.backing == "disk":
            os.fsync(fd)
        return os.fstat(fd)

    def seal(self, name: str) -> os.stat_result:
        """Make a file read-only and, on a disk, durable. Returns its stat."""
        try:
            with opened(name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=self.fd) as fd:
                return self._seal(fd)
        except OSError as problem:
            self.raise_if_full(problem)
            raise

    def raise_if_full(self, problem: BaseException) -> None:
        """Raise NoRoom if a write failed because the store is full. Otherwise do nothing."""
        if isinstance(problem, OSError) and problem.errno in FULL:
            # The space may be free again by now: then report one byte as missing.
            missing = store_free_space.shortfalls(self.store, self.need, 0) or [
                (1, store_free_space.tightest(store_free_space.bounds(self.store)))
            ]
            raise store_free_space.no_room_error(
                self.store, self.need, *max(missing, key=lambda pair: pair[0])
            ) from problem

    def publish(self, key: str) -> bool:
        """Give the directory its visible name, in one step. False if an entry of that name exists."""
        if self.store.backing == "disk":
            os.fsync(self.fd)
        step("publish")
        try:
            with store_lock(self.store), keep_count(self.store, self.name, comes=True):
                os.rename(self.name, key, src_dir_fd=self.store.work, dst_dir_fd=self.store.fd)
        except OSError as problem:
            if problem.errno in (errno.EEXIST, errno.ENOTEMPTY):
                return False
            self.raise_if_full(problem)
            raise
        if self.store.backing == "disk":
            os.fsync(self.store.fd)
        return True

    def close(self) -> None:
        """Remove everything that is not published, and the lock. Calling it again does nothing."""
        if self._lock.fd < 0 or self._lock.pid != os.getpid():  # a forked child is not the builder
            return
        try:
            with store_lock(self.store):
                self._clear()
        except OSError:
            pass  # the lock is released, so the next build or gc deletes what is left
        finally:
            self._release()

    def _release(self) -> None:
        """Close all descriptors. Anything left is then a dead builder's."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1
        self._lock.release()

    def _clear(self) -> None:
        moved = move_to_trash(self.store, self.name, self.store.work)
        try:
            os.unlink(self.lock_file, dir_fd=self.store.work)
        except FileNotFoundError:
            pass
        self._release()
        if moved is not None:
            delete_trash(self.store, moved)

    def __enter__(self) -> StagingDirectory:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
