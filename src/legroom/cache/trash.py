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
from collections.abc import Iterator
from contextlib import contextmanager

from legroom.cache import locks
from legroom.cache.place import STORE_LOCK, Store
from legroom.cache.steps import step

TRASH, BUILDING = ".trash-", ".building-"


@contextmanager
def store_lock(store: Store) -> Iterator[None]:
    """The store's one lock, held for moments: whoever holds it takes no other lock but without waiting."""
    lock = locks.acquire(store.locks, STORE_LOCK, block=True)
    assert lock is not None  # a blocking lock is never refused
    with lock:
        yield


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
        shutil.rmtree(name, dir_fd=store.fd, ignore_errors=True)
        os.unlink(name, dir_fd=store.fd)  # a plain file, which rmtree leaves alone
    except OSError:
        pass  # gone, or still filled by somebody else's file: the next sweep sees it again


def sweep(store: Store) -> int:
    """Clear what dead builders and interrupted removals left, under the store's lock; how many things."""
    cleared = 0
    alive = set()
    for name in os.listdir(store.locks):
        if not (name.startswith("building-") and name.endswith(".lock")):
            continue
        ident = name.removeprefix("building-").removesuffix(".lock")
        try:
            lock = locks.acquire(store.locks, name, create=False)
        except FileNotFoundError:
            continue
        if lock is None:
            alive.add(ident)
            continue
        with lock:
            move(store, BUILDING + ident)
            os.unlink(name, dir_fd=store.locks)
            cleared += 1
    for name in os.listdir(store.fd):
        if name.startswith(BUILDING) and name.removeprefix(BUILDING) not in alive:
            move(store, name)
            cleared += 1
    for name in os.listdir(store.fd):
        if name.startswith(TRASH):
            delete(store, name)
    return cleared
