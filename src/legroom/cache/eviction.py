"""Remove entries in one visible step: move to trash, delete, evict the least recently used.

Every removal renames to ``work/trash-*`` under the store's lock, so a name that was checked under that lock still
stands for the same thing when it is renamed. A process killed in between leaves a ``trash-*`` or ``building-*``
directory, which the next build or gc deletes. Both are in ``work/``, with the locks of builders: listing it does not
take longer with more entries.

Exclusive locks on entries are taken here alone, under the store's lock and without waiting.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from dataclasses import dataclass

from legroom.cache import capacity, locks
from legroom.cache.attach import lock_name, open_entry, read_manifest
from legroom.cache.capacity import directory_bytes, keep_count
from legroom.cache.manifest import Damaged, OtherFormat, is_key
from legroom.cache.store import BUILDING, LOCK, TRASH, Store, in_memory, log, step
from legroom.words import say


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

    def __call__(self, old: LeastRecent, bound: capacity.Bound) -> bool:
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


def evict_until_fits(store: Store, need: capacity.Need, *, mine: str | None = None) -> bool:
    """Evict until ``need`` fits, under the store's lock. False, with nothing removed, if that is impossible."""
    helps = FreesSpace(store)
    missing = capacity.shortfalls(store, need, capacity.outstanding_reservations(store, mine))
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
        missing = capacity.shortfalls(store, need, capacity.outstanding_reservations(store, mine))
        if not missing:
            return True
    return False


def move_to_trash(store: Store, name: str, folder: int | None = None) -> str | None:
    """Rename to trash, under the store's lock. Returns the new name, None if it does not exist.

    ``folder`` is the directory it is in, by default the store itself.
    """
    target = TRASH + secrets.token_hex(8)
    source = store.fd if folder is None else folder
    step("trash")
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.work)
    except FileNotFoundError:
        return None
    except OSError:
        # A directory without write permission cannot be moved to another parent, only renamed.
        target = "." + target
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.fd)
    return target


def move_entry_to_trash(store: Store, key: str) -> str | None:
    """Rename an entry to trash, under the store's lock. Returns the new name, None if it does not exist."""
    with keep_count(store, key):
        return move_to_trash(store, key)


def delete_trash(store: Store, name: str) -> None:
    """Delete a trash directory. Several processes may do so at once."""
    step("delete")
    folder = store.fd if name.startswith(".") else store.work
    if not name.removeprefix(".").startswith(TRASH):
        raise ValueError(name)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder, ignore_errors=True)
        else:
            os.unlink(name, dir_fd=folder)  # rmtree would open it, and hang on a FIFO
    except OSError:
        pass  # gone, or not empty yet: the next gc or build tries again


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What dead builders and interrupted removals left in one directory."""

    folder: int  # of the directories
    locks: int
    dot: str  # before the names of the directories
    dead: tuple[str, ...]  # builders
    trash: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dead) + len(self.trash)


def leftovers(store: Store) -> Leftovers:
    """The leftovers in ``work/``. Call it under the store's lock."""
    return _leftovers(store.work, store.work, "")


def leftovers_outside_work(store: Store) -> Leftovers:
    """The leftovers of earlier versions, which had no ``work/``. Lists all entries and locks."""
    return _leftovers(store.fd, store.locks, ".")


def _leftovers(folder: int, locks_folder: int, dot: str) -> Leftovers:
    """List dead builders and trash.

    A builder holds its lock from before its directory exists until after it is gone. So a lock file or directory whose
    lock is not held belongs to a dead builder. Both of one builder count as one.
    """
    found = os.listdir(folder)
    noted = found if locks_folder == folder else os.listdir(locks_folder)
    names = {name.removesuffix(LOCK) for name in noted if name.startswith(BUILDING) and name.endswith(LOCK)}
    names |= {name.removeprefix(dot).removesuffix(LOCK) for name in found if name.startswith(dot + BUILDING)}
    dead = tuple(name for name in sorted(names) if not locks.held(locks_folder, name + LOCK))
    return Leftovers(
        folder, locks_folder, dot, dead, tuple(name for name in found if name.startswith(dot + TRASH))
    )


def delete_leftovers(store: Store, left: Leftovers) -> None:
    """Delete what dead builders and interrupted removals left, under the store's lock."""
    for name in left.trash:
        delete_trash(store, name)
    for name in left.dead:
        for folder, part in ((left.folder, left.dot + name), (left.locks, name + LOCK)):
            moved = move_to_trash(store, part, folder)
            if moved is not None:
                delete_trash(store, moved)
