"""Who builds: one process holds the source's lock, the others wait for the entry or for their turn.

Covers: waiting, taking over, showing the builder's progress. Does not cover: building (build.py).
"""

from __future__ import annotations

import os
import time

from legroom.cache import locks, room
from legroom.cache.attach import Attached
from legroom.cache.find import find
from legroom.cache.load import Asked, Progress
from legroom.cache.locks import Lock
from legroom.cache.place import Store, each
from legroom.cache.trash import BUILDING
from legroom.cache.work import Work
from legroom.errors import NotLoaded
from legroom.words import say

_POLL = 0.05


def turn(asked: Asked, store: Store) -> Lock | Attached:
    """Wait to be the builder, or for the builder to be done."""
    name = f"src-{asked.source.name}.lock"
    pause = 0.002
    while True:
        lock = locks.acquire(store.locks, name)
        if lock is not None:
            return lock
        found = find(asked.request, asked.source, asked.when_ns)
        if found is not None:
            return found
        if not asked.wait:
            raise NotLoaded(
                say("{path} is being loaded by another process", path=asked.source.paths[0]),
                why=say("wait=False was asked for"),
                fix=(say("wait=True waits for it"), say("try again later")),
            )
        if asked.progress is not None:
            _report_other(store, name, asked.progress)
        time.sleep(pause)
        pause = min(_POLL, pause * 1.5)


def _report_other(store: Store, name: str, progress: Progress) -> None:
    """Pass on what the builder, whose work the lock file names, has noted."""
    try:
        fd = os.open(name, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=store.locks)
    except OSError:
        return
    try:
        backing, _, work = os.read(fd, 100).decode("ascii", "replace").strip().partition(" ")
    finally:
        os.close(fd)
    if not work.startswith(BUILDING) or "/" in work:
        return
    for place in each():
        if place.backing == backing:
            _, done, total = room.read_note(place, work)
            if total:
                progress(done, total)


def name_work(asked: Asked, home: Store, work: Work) -> None:
    """Say in the election's lock file whose note tells the progress."""
    fd = os.open(
        f"src-{asked.source.name}.lock", os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=home.locks
    )
    try:
        os.pwrite(fd, f"{work.store.backing} {work.lock_file}\n".encode(), 0)
    except OSError:
        pass  # a /dev/shm that is full to the last page: others wait without seeing how far it is
    finally:
        os.close(fd)
