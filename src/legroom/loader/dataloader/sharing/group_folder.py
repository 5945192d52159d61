"""The files of the groups: one folder in the store, private to the user, with a socket and locks for each group.

    KEY.sock    the producer listens here
    KEY.lock    held by the producer while it lives, so there is never a second one: the trainer that gets the lock
                starts a producer, which inherits it
    KEY.alone   held by a trainer that has no producer because no other trainer is there: one that comes and does not
                get it starts a producer. It says what must be equal in the group
    KEY.log     what the producer and its workers print; removed when it ends by itself. A dataset may print for every
                sample, so only the end is kept

No batch is stored here.
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from legroom.cache import locks
from legroom.cache.store_directories import existing_stores, open_stores
from legroom.errors import ShareUnsupported
from legroom.loader.dataloader.sharing.producer_messages import Closed, Connection
from legroom.messages import say
from legroom.records.watch_sample import GroupRow, TrainerRow
from legroom.system.unix_sockets import FOLDER_FLAGS, HIDDEN, address, open_private_folder, require_same_user, unlink

FOLDER = "share"
SOCKET, LOCK, ALONE = ".sock", ".lock", ".alone"
_STATUS_S = 1.0


def group_folder() -> Path:
    """The folder of all groups of this user, made if it is missing."""
    with open_stores(make=True) as stores:
        path = stores.election_store.root / FOLDER
    try:
        os.close(open_private_folder(path))
    except OSError as problem:
        raise ShareUnsupported(
            say("batches cannot be shared: {path} cannot be used", path=path), why=problem.strerror or str(problem),
            fix=(say("remove {path}, or have its owner remove it", path=path),),
        ) from problem  # fmt: skip
    return path


class GroupFiles:
    """The files of one group."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path, self.key = folder, key
        self._folder = -1
        self._pid = 0

    @property
    def folder(self) -> int:
        """A descriptor of the folder."""
        if self._folder < 0 or self._pid != os.getpid():
            self._folder, self._pid = open_private_folder(self.path), os.getpid()
        return self._folder

    def connect(self) -> Connection | None:
        """A connection to the producer; None if there is none."""
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        sock.settimeout(0.2)
        try:
            sock.connect(address(self.folder, self.key + SOCKET))
            require_same_user(sock)
        except (OSError, ValueError):
            sock.close()
            return None
        return Connection(sock)

    def lock(self) -> locks.Lock | None:
        """Take the producer's lock; None if there is a producer. A child keeps it: see start_producer_process.py."""
        return locks.acquire(self.folder, self.key + LOCK, lease=True)

    def producer_starts(self) -> bool:
        """Whether a process holds the producer's lock."""
        try:
            lock = locks.acquire(self.folder, self.key + LOCK, create=False)
        except FileNotFoundError:
            return False
        if lock is None:
            return True
        lock.release()
        return False

    def stand_alone(self) -> locks.Lock | None:
        """Take the lock of the only trainer; None if there is another trainer. Forked children do not keep it."""
        return locks.acquire(self.folder, self.key + ALONE)

    def release_alone(self, lock: locks.Lock) -> None:
        """Another trainer may be the only one."""
        if lock.fd >= 0 and lock.pid == os.getpid():
            self.remove(ALONE)  # before it is released: nobody else has the file then
            lock.release()

    def describe_alone(self, lock: locks.Lock, about: dict[str, Any]) -> None:
        """Write what others may know of the only trainer."""
        data = json.dumps(about).encode()
        os.pwrite(lock.fd, data, 0)
        os.ftruncate(lock.fd, len(data))

    def alone(self) -> dict[str, Any] | None:
        """What the only trainer has written; None if there is none, or it has not written it yet."""
        try:
            fd = os.open(self.key + ALONE, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=self.folder)
            with open(fd, "rb") as file:
                found: dict[str, Any] = json.loads(file.read())
        except (OSError, ValueError):
            return None
        return found

    def open_log(self) -> int:
        """A descriptor of an empty log."""
        return open_empty_log(self.folder, self.key + LOG)

    def shorten_log(self) -> None:
        """Keep the end of a long log."""
        shorten_log(self.folder, self.key + LOG)

    def log_path(self) -> Path:
        return self.path / (self.key + LOG)

    def remove(self, *kinds: str) -> None:
        """Remove files of the group."""
        for kind in kinds:
            unlink(self.folder, self.key + kind)

    def remove_leftovers(self, patience: float = 0.0) -> None:
        """Remove the files of a producer that was killed, if there is no other.

        One that ended by itself has removed its lock, and left its log only if an error names it. One that was killed
        a moment ago may hold its lock for some milliseconds yet: so long it is waited for.
        """
        until = time.monotonic() + patience
        while True:
            try:
                lock = locks.acquire(self.folder, self.key + LOCK, create=False, lease=True)
            except FileNotFoundError:
                return
            if lock is not None:
                self.remove(SOCKET, SOCKET + HIDDEN, LOG, LOCK)  # the lock last: then another producer may start
                lock.release()
                return
            if time.monotonic() > until or self._answers():
                return
            time.sleep(0.01)

    def _answers(self) -> bool:
        """Whether a producer listens."""
        connection = self.connect()
        if connection is not None:
            connection.close()
        return connection is not None

    def close(self) -> None:
        """Close the descriptor of the folder."""
        if self._folder >= 0 and self._pid == os.getpid():
            os.close(self._folder)
        self._folder = -1

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit() and hasattr(self, "_pid"):  # at exit the kernel closes it
            self.close()


def groups() -> list[dict[str, Any]]:
    """What every producer of this user reports of its group."""
    found: list[dict[str, Any]] = []
    if sys.platform != "linux":
        return found
    for path in _folders():
        for name in sorted(os.listdir(path)):
            key, kind = os.path.splitext(name)
            read = {SOCKET: _status, ALONE: _alone_status}.get(kind)
            if read is not None and (status := read(GroupFiles(path, key))) is not None:
                found.append(status)
    return found


def group_rows() -> tuple[GroupRow, ...]:
    """The same, for `legroom watch`."""
    return tuple(
        GroupRow(
            one["name"], one["producer"], len(one["workers"]), one["batches"], one["most_batches"], one["bytes"],
            one["error"], tuple(_trainer_row(trainer, one["position"]) for trainer in one["trainers"]),
        )
        for one in groups()
    )  # fmt: skip


def _trainer_row(trainer: dict[str, Any], head: list[int] | None) -> TrainerRow:
    epoch, batch = trainer["position"] or (None, None)
    behind = None if head is None or batch is None or epoch != head[0] else max(0, head[1] - batch)
    return TrainerRow(
        trainer["pid"], trainer["command"], trainer["state"], epoch, batch, behind, trainer["shared"],
        trainer["made_itself"],
    )  # fmt: skip


def _alone_status(files: GroupFiles) -> dict[str, Any] | None:
    """A group of one trainer, without a producer."""
    lock = files.stand_alone()
    if lock is not None:  # left by a trainer that was killed
        files.release_alone(lock)
        return None
    about = files.alone()
    if about is None:
        return None
    trainer = {"pid": about["pid"], "command": about["command"], "position": None, "state": "alone", "shared": 0,
               "made_itself": 0}  # fmt: skip
    return {"name": about["name"], "producer": None, "workers": [], "position": None, "batches": 0, "most_batches": 0,
            "bytes": 0, "gpus": [], "error": None, "trainers": [trainer]}  # fmt: skip


def _folders() -> Iterator[Path]:
    for store in existing_stores():
        path = store.root / FOLDER
        try:
            os.close(os.open(path, FOLDER_FLAGS))
        except OSError:
            continue
        yield path


def _status(files: GroupFiles) -> dict[str, Any] | None:
    connection = files.connect()
    if connection is None:
        files.remove_leftovers()
        return None
    try:
        connection.send("status")
        received = connection.receive(_STATUS_S)
        if received is None or received[0][0] != "status":
            return None
        status: dict[str, Any] = json.loads(received[0][1])
        return status
    except (Closed, ValueError, TypeError):
        return None
    finally:
        connection.close()


LOG = ".log"
_LARGEST_LOG, _KEPT_OF_LOG = 1 << 20, 64 << 10  # bytes: the log is in the store, which may be in memory


def open_empty_log(folder: int, name: str) -> int:
    """A descriptor of an empty log in that folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(name, flags, 0o600, dir_fd=folder)


def shorten_log(folder: int, name: str) -> None:
    """Keep only the end of a log that is too long; the producer does so every now and then."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return
    try:
        size = os.fstat(fd).st_size
        if size > _LARGEST_LOG:
            end = os.pread(fd, _KEPT_OF_LOG, size - _KEPT_OF_LOG)
            os.ftruncate(fd, 0)
            os.write(fd, end)
    except OSError:
        pass
    finally:
        os.close(fd)
