"""Removing things from a store so that nobody sees them half gone.

Covers: the rename to ``.trash-*``, deleting what was so renamed, and clearing after dead builders.
Does not cover: deciding what may go (reap.py).

Everything that takes a visible name away does so under the store's lock, so a name that was looked at under
that lock still stands for the same thing when it is renamed. A process killed in between leaves a
``.trash-*`` or ``.building-*`` directory that the next sweep deletes.
"""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Iterator
from contextlib import contextmanager

from legroom.cache import locks
from legroom.cache.place import STORE_LOCK, Store
from legroom.cache.steps import step

TRASH, BUILDING = ".trash-", ".building-"
_LOCK = ".lock"


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


def move(store: Store, name: str) -> str | None:
    """Rename to trash, under the store's lock; the new name, None where there was nothing."""
    target = TRASH + secrets.token_hex(8)
    step("trash")
    try:
        os.rename(name, target, src_dir_fd=store.fd, dst_dir_fd=store.fd)
    except FileNotFoundError:
        return None
    return target


def delete(store: Store, name: str) -> None:
    """Delete a trash directory; several processes may do so at once."""
    step("delete")
    if not name.startswith(TRASH):
        raise ValueError(name)
    try:
        if stat.S_ISDIR(os.stat(name, dir_fd=store.fd, follow_symlinks=False).st_mode):
            shutil.rmtree(name, dir_fd=store.fd, ignore_errors=True)
        else:
            os.unlink(name, dir_fd=store.fd)  # rmtree would open it, and for a FIFO wait for ever
    except OSError:
        pass  # gone, or still filled by somebody else's file: the next sweep sees it again


def leftovers(store: Store) -> list[str]:
    """What dead builders and interrupted removals left, looked at under the store's lock: a name for each.

    A builder holds its lock from before its directory is there until after it has gone, so a lock file or a directory
    without a lock that is held is somebody's who died; both of one builder are one.
    """
    noted = {name.removesuffix(_LOCK) for name in os.listdir(store.locks) if _is_builders(name)}
    found = os.listdir(store.fd)
    begun = {name.removeprefix(".") for name in found if name.startswith(BUILDING)}
    dead = [f".{name}" for name in sorted(noted | begun) if not locks.held(store.locks, name + _LOCK)]
    return [*dead, *(name for name in found if name.startswith(TRASH))]


def sweep(store: Store) -> None:
    """Clear what dead builders and interrupted removals left, under the store's lock."""
    for name in leftovers(store):
        if name.startswith(BUILDING):
            move(store, name)
            try:
                os.unlink(name.removeprefix(".") + _LOCK, dir_fd=store.locks)
            except FileNotFoundError:
                pass  # a directory alone
    for name in os.listdir(store.fd):
        if name.startswith(TRASH):
            delete(store, name)


def _is_builders(name: str) -> bool:
    return name.startswith(BUILDING.removeprefix(".")) and name.endswith(_LOCK)
