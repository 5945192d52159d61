"""Remove unused entries, least recently used first, until a build fits.

Exclusive locks on entries are taken here alone, under the store's lock and without waiting.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass

from legroom.cache import locks, store_free_space
from legroom.cache.lease_and_map_entry import lock_name, opened_entry, read_manifest
from legroom.cache.manifest import Damaged, OtherFormat, is_key
from legroom.cache.store_directories import (
    DOWNLOAD,
    LOCK,
    Store,
    delete_trash,
    in_memory,
    leftovers,
    log,
    move_to_trash,
    step,
)
from legroom.cache.store_free_space import directory_bytes, keep_count
from legroom.messages import say


@dataclass(frozen=True, slots=True)
class LeastRecent:
    """An entry with its last use and size."""

    key: str
    last_used: float
    nbytes: int  # by blocks


def least_recent_first(store: Store) -> list[LeastRecent]:
    """Every entry, least recently used first."""
    found = []
    for name in os.listdir(store.fd):
        if is_key(name):
            found.append(LeastRecent(name, last_used(store, name), directory_bytes(store.fd, name)))
    return sorted(found, key=lambda old: old.last_used)


def last_used(store: Store, key: str) -> float:
    """When the entry was last attached: the mtime of its lock file, else of the entry."""
    for folder, name in ((store.locks, lock_name(key)), (store.fd, key)):
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
        except OSError:
            continue
    return 0.0


def trash_unused(store: Store, key: str, *, force: bool = False) -> str | None:
    """Move an unused entry to the trash, under the store's lock. Returns its trash name, None if it is in use.

    The lock file's name is removed too: a process that waits for it, or holds it during a forced removal, sees that
    and tries again.
    """
    step("hold")
    lock = locks.acquire(store.locks, lock_name(key))
    if lock is None and not force:
        return None
    try:
        moved = move_entry_to_trash(store, key)
        step("unlock")
        if moved is not None or lock is not None:  # else a builder has leased it and not yet published it
            try:
                os.unlink(lock_name(key), dir_fd=store.locks)
            except FileNotFoundError:
                pass
    finally:
        if lock is not None:
            lock.release()
    return moved


class FreesSpace:
    """Whether removing an entry frees space under a bound.

    The pages of an entry in memory are charged to the cgroup of the process that built it, so evicting an entry that
    another container built frees nothing here. An entry without recorded cgroups counts for none of them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._charged: dict[str, tuple[int, ...]] = {}

    def __call__(self, old: LeastRecent, bound: store_free_space.Bound) -> bool:
        """Whether removing the entry frees its bytes under that bound."""
        if bound.memory and not in_memory(self._store):
            return False  # pages of a disk store are page cache, which the kernel reclaims by itself
        if bound.inodes:
            return False
        return bound.group is None or bound.group in self._cgroups(old.key)

    def _cgroups(self, key: str) -> tuple[int, ...]:
        if key not in self._charged:
            try:
                with opened_entry(self._store, key) as folder:
                    self._charged[key] = read_manifest(folder, key).cgroups
            except (Damaged, OtherFormat, OSError):
                self._charged[key] = ()
        return self._charged[key]


def evict_until_fits(store: Store, need: store_free_space.BuildNeed, *, mine: str | None = None) -> bool:
    """Evict until ``need`` fits, under the store's lock. False, with nothing removed, if that is impossible."""
    helps = FreesSpace(store)
    missing = store_free_space.shortfalls(store, need, store_free_space.outstanding_reservations(store, mine))
    if not missing:
        return True
    unused = [old for old in least_recent_first(store) if not locks.held(store.locks, lock_name(old.key))]
    for count, bound in missing:
        if count > sum(old.nbytes for old in unused if helps(old, bound)):
            return False
    for old in unused:
        if not any(helps(old, bound) for _, bound in missing):
            continue
        moved = trash_unused(store, old.key)
        if moved is None:
            continue  # a process has attached it meanwhile
        log.info("%s", say("evicted {key} from {root}", key=old.key, root=store.root))
        delete_trash(store, moved)
        missing = store_free_space.shortfalls(store, need, store_free_space.outstanding_reservations(store, mine))
        if not missing:
            return True
    return False


def move_entry_to_trash(store: Store, key: str) -> str | None:
    """Rename an entry to trash, under the store's lock. Returns the new name, None if it does not exist."""
    with keep_count(store, key):
        return move_to_trash(store, key)


ABANDONED = 24 * 3600.0  # seconds after which gc removes a download that no process works on


def leftover_bytes(store: Store) -> int:
    """What dead builders and interrupted removals left takes, under the store's lock."""
    return sum(directory_bytes(store.work, name) for names in leftovers(store) for name in names)


def unused_downloads(store: Store, older: float = 0.0) -> list[str]:
    """Downloads that no process works on and that have not grown for ``older`` seconds. Under the store's lock."""
    found = []
    for name in os.listdir(store.work):
        if not name.startswith(DOWNLOAD) or name.endswith(LOCK) or locks.held(store.work, name + LOCK):
            continue
        if time.time() - _last_grown(store, name) >= older:
            found.append(name)
    return found


def remove_unused_downloads(store: Store) -> None:
    """Remove them, under the store's lock."""
    for name in unused_downloads(store):
        remove_download(store, name)


def remove_download(store: Store, name: str) -> None:
    """Remove a download and its lock file, under the store's lock."""
    moved = move_to_trash(store, name, store.work)
    try:
        os.unlink(name + LOCK, dir_fd=store.work)
    except FileNotFoundError:
        pass
    if moved is not None:
        delete_trash(store, moved)


def _last_grown(store: Store, name: str) -> float:
    found = 0.0
    for part in (name, f"{name}/pieces", f"{name}/data"):
        try:
            found = max(found, os.stat(part, dir_fd=store.work, follow_symlinks=False).st_mtime)
        except OSError:
            continue
    return found
