"""Removing things from a store so that nobody sees them half gone.

Covers: the rename to ``work/trash-*``, deleting what was so renamed, and clearing after dead builders.
Does not cover: deciding what may go (reap.py).

Everything that takes a visible name away does so under the store's lock, so a name that was looked at under
that lock still stands for the same thing when it is renamed. A process killed in between leaves a
``trash-*`` or ``building-*`` directory that the next sweep deletes. Both are in ``work/``, with the locks of builders:
a sweep lists what is in progress, and its cost does not grow with the number of entries.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from legroom.cache import locks
from legroom.cache.place import STORE_LOCK, Store
from legroom.cache.steps import step
from legroom.cache.store_size import counted

TRASH, BUILDING, LOCK = "trash-", "building-", ".lock"


@contextmanager
def store_lock(store: Store) -> Iterator[None]:
    """The store's one lock, held for moments: whoever holds it takes no other lock but without waiting."""
    lock = locks.acquire(store.locks, STORE_LOCK, block=True)
    assert lock is not None  # a blocking lock is never refused
    with lock:
        yield


def in_use(store: Store, lock_file: str) -> bool:
    """Whether a process holds that lock: asked under the store's lock, so that no other takes the asking for a use."""
    with store_lock(store):
        return locks.held(store.locks, lock_file)


def move(store: Store, name: str, folder: int | None = None) -> str | None:
    """Rename to trash, under the store's lock; the new name, None where there was nothing.

    ``folder`` is where it lies; among the entries where it is not given.
    """
    target = TRASH + secrets.token_hex(8)
    source = store.fd if folder is None else folder
    step("trash")
    try:
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.work)
    except FileNotFoundError:
        return None
    except OSError:
        # A directory that this user may not write to cannot get another parent, but another name.
        target = "." + target
        os.rename(name, target, src_dir_fd=source, dst_dir_fd=store.fd)
    return target


def move_entry(store: Store, key: str) -> str | None:
    """Rename an entry to trash, under the store's lock; the new name, None where there was none."""
    with counted(store, key):
        return move(store, key)


def delete(store: Store, name: str) -> None:
    """Delete a trash directory; several processes may do so at once."""
    step("delete")
    folder = store.fd if name.startswith(".") else store.work
    if not name.removeprefix(".").startswith(TRASH):
        raise ValueError(name)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=folder, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=folder, ignore_errors=True)
        else:
            os.unlink(name, dir_fd=folder)  # rmtree would open it, and for a FIFO wait for ever
    except OSError:
        pass  # gone, or still filled by somebody else's file: the next sweep sees it again


@dataclass(frozen=True, slots=True)
class Leftovers:
    """What dead builders and interrupted removals left in one place."""

    folder: int  # of the directories
    locks: int
    dot: str  # before the names of the directories
    dead: tuple[str, ...]  # builders
    trash: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.dead) + len(self.trash)


def leftovers(store: Store) -> Leftovers:
    """What is left in ``work/``, read under the store's lock."""
    return _leftovers(store.work, store.work, "")


def old_leftovers(store: Store) -> Leftovers:
    """What versions left that had no ``work/``: beside the entries and their locks, all of which this lists."""
    return _leftovers(store.fd, store.locks, ".")


def _leftovers(folder: int, locks_folder: int, dot: str) -> Leftovers:
    """A builder holds its lock from before its directory is there until after it has gone, so a lock file or a
    directory without a lock that is held belongs to a builder that died; both of one builder are one."""
    found = os.listdir(folder)
    noted = found if locks_folder == folder else os.listdir(locks_folder)
    names = {name.removesuffix(LOCK) for name in noted if name.startswith(BUILDING) and name.endswith(LOCK)}
    names |= {name.removeprefix(dot).removesuffix(LOCK) for name in found if name.startswith(dot + BUILDING)}
    dead = tuple(name for name in sorted(names) if not locks.held(locks_folder, name + LOCK))
    return Leftovers(
        folder, locks_folder, dot, dead, tuple(name for name in found if name.startswith(dot + TRASH))
    )


def sweep(store: Store, left: Leftovers) -> None:
    """Clear what dead builders and interrupted removals left, under the store's lock."""
    for name in left.trash:
        delete(store, name)
    for name in left.dead:
        for folder, part in ((left.folder, left.dot + name), (left.locks, name + LOCK)):
            moved = move(store, part, folder)
            if moved is not None:
                delete(store, moved)
