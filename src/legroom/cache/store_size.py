"""How many bytes a store takes.

Covers: the bytes of one directory, of all entries, of the whole store, and keeping the count of all entries up to date.
Does not cover: what limits them (room.py).

The limit of a disk store needs the sum of all entries with every build. Reading the size of every file would make a
build slower with each entry, so the sum is kept in ``work/used``, with the mtime of the store's directory. That mtime
changes whenever an entry comes or goes, so a sum that missed a change (a process was killed, an entry was removed by
hand) does not match any more, and the entries are counted anew.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from legroom.cache.manifest import is_key
from legroom.cache.place import Store

_COUNT = "used"


def blocks(folder: int, name: str) -> int:
    """The bytes that a directory in the open directory ``folder`` takes, by blocks."""
    total = 0
    try:
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except OSError:
        return 0
    try:
        with os.scandir(fd) as entries:
            for entry in entries:
                try:
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                except OSError:
                    continue
    except OSError:
        pass
    finally:
        os.close(fd)
    return total


def used(store: Store) -> int:
    """The bytes that entries, builders and removals in progress take; lock files and records are not counted.

    Asked under the store's lock: two changes within a tick of the file system's clock have the same mtime.
    """
    changed = os.fstat(store.fd).st_mtime_ns
    total = _read(store)
    if total is None:
        total = sum(blocks(store.fd, name) for name in os.listdir(store.fd) if is_key(name))
        _write(store, total, changed)
    return total + sum(blocks(store.work, name) for name in os.listdir(store.work))


@contextmanager
def counted(store: Store, name: str, *, comes: bool = False) -> Iterator[None]:
    """Around the rename that removes the entry ``name``, or adds what is ``name`` in ``work/``, under the store's lock.

    The count is not there while the rename is under way: a kill in between leaves none, and not a wrong one.
    """
    total = _read(store)
    if total is None:  # no one asks for the sum here, or the next who does counts
        yield
        return
    change = blocks(store.work, name) if comes else -blocks(store.fd, name)
    count_again(store)
    yield
    _write(store, total + change)


def count_again(store: Store) -> None:
    """Forget the count: the next who asks counts the entries."""
    with suppress(OSError):
        os.unlink(_COUNT, dir_fd=store.work)


def _read(store: Store) -> int | None:
    """The count of all entries; None where there is none that holds for the store as it is now."""
    flags = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    try:
        fd = os.open(_COUNT, flags, dir_fd=store.work)
        try:
            data = os.read(fd, 100)
        finally:
            os.close(fd)
        changed, total = (int(word) for word in data.removesuffix(b"\n").split(b" "))
    except (OSError, ValueError):
        return None
    return total if data.endswith(b"\n") and changed == os.fstat(store.fd).st_mtime_ns else None


def _write(store: Store, total: int, changed: int | None = None) -> None:
    """Keep the count; where that fails the next one counts again."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
    with suppress(OSError):
        changed = os.fstat(store.fd).st_mtime_ns if changed is None else changed
        fd = os.open(_COUNT, flags, 0o600, dir_fd=store.work)
        try:
            os.write(fd, f"{changed} {total}\n".encode())
        finally:
            os.close(fd)
