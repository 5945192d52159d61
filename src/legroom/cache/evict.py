"""Entries nobody uses, least recently used first, removed until there is room.

Covers: which entries may go, in which order, and taking one away. Does not cover: the commands (reap.py).

Exclusive locks on entries are taken here alone, under the store's lock and without waiting.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

from legroom.cache import locks, room, trash
from legroom.cache.attach import lock_name, open_entry, read_manifest
from legroom.cache.manifest import Damaged, OtherFormat, is_key
from legroom.cache.place import Store, in_memory
from legroom.cache.steps import log, step
from legroom.cache.store_size import blocks
from legroom.words import say


@dataclass(frozen=True, slots=True)
class Old:
    """An entry as its lock file knows it."""

    key: str
    last_used: float
    nbytes: int  # by blocks


def by_age(store: Store) -> list[Old]:
    """Every entry, the one used longest ago first."""
    found = []
    for name in os.listdir(store.fd):
        if is_key(name):
            found.append(Old(name, last_used(store, name), blocks(store.fd, name)))
    return sorted(found, key=lambda old: old.last_used)


def last_used(store: Store, key: str) -> float:
    """When somebody last attached the entry: the mtime of its lock file, else of the entry."""
    for folder, name in ((store.locks, lock_name(key)), (store.fd, key)):
        try:
            return os.stat(name, dir_fd=folder, follow_symlinks=False).st_mtime
        except OSError:
            continue
    return 0.0


def take_away(store: Store, key: str, *, force: bool = False) -> str | None:
    """Move an unused entry to the trash, under the store's lock; its trash name, None where it is in use.

    The lock file's name goes too: whoever waits for it, or holds it by force's leave, sees that and looks again.
    """
    step("hold")
    lock = locks.acquire(store.locks, lock_name(key))
    if lock is None and not force:
        return None
    try:
        moved = trash.move_entry(store, key)
        step("unlock")
        if moved is not None or lock is not None:  # else a builder leases what it has not yet published
            try:
                os.unlink(lock_name(key), dir_fd=store.locks)
            except FileNotFoundError:
                pass
    finally:
        if lock is not None:
            lock.release()
    return moved


class Helpful:
    """Which entries make room under which bound.

    The pages of an entry in memory are charged to the cgroup of the process that built it, so evicting one that
    another container built frees nothing here. An entry that does not say which cgroups it was built in counts for
    none of them.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self._charged: dict[str, tuple[int, ...]] = {}

    def __call__(self, old: Old, bound: room.Bound) -> bool:
        """Whether removing the entry frees its bytes under that bound."""
        if bound.memory and not in_memory(self._store):
            return False  # pages of a disk store are page cache, which the kernel reclaims by itself
        if bound.inodes:
            return False
        return bound.group is None or bound.group in self._cgroups(old.key)

    def _cgroups(self, key: str) -> tuple[int, ...]:
        if key not in self._charged:
            try:
                folder = open_entry(self._store, key)
                try:
                    self._charged[key] = read_manifest(folder, key).cgroups
                finally:
                    os.close(folder)
            except (Damaged, OtherFormat, OSError):
                self._charged[key] = ()
        return self._charged[key]


def evict_for(store: Store, need: room.Need, *, mine: str | None = None) -> bool:
    """Evict until ``need`` fits, under the store's lock; False, and nothing removed, where it cannot."""
    helps = Helpful(store)
    missing = room.shortfalls(store, need, room.outstanding(store, mine))
    unused = [old for old in by_age(store) if not locks.held(store.locks, lock_name(old.key))]
    for count, bound in missing:
        if count > sum(old.nbytes for old in unused if helps(old, bound)):
            return False
    for old in unused:
        if not any(helps(old, bound) for _, bound in missing):
            continue
        moved = take_away(store, old.key)
        if moved is None:
            continue  # somebody came
        log.info("%s", say("evicted {key} from {root}", key=old.key, root=store.root))
        trash.delete(store, moved)
        missing = room.shortfalls(store, need, room.outstanding(store, mine))
        if not missing:
            return True
    return False
