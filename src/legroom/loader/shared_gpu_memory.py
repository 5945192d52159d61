"""One copy in GPU memory for every process: made by the first, handed on by any that has it, freed with the last.

The memory is allocated with CUDA's virtual memory functions and exported as a file descriptor. Each process that has it
listens on a Unix socket in the store's folder ``gpu`` and sends the descriptor to processes of the same user that ask.
There is no daemon: the driver frees the memory when the last descriptor and the last map are gone, also after kill -9.

One process makes a copy while the others wait for its lock. A socket whose process is gone refuses connections and is
removed by the next process that asks. Forked children close what they inherit: they cannot use CUDA, and must not
keep the memory.
"""

from __future__ import annotations

import atexit
import errno
import hashlib
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from legroom.cache import list_gpu_copies, locks
from legroom.cache.list_gpu_copies import FOLDER, MESSAGE, SOCKET, VERSION, ask_all
from legroom.gpu.cuda_driver_api import READ, READ_WRITE, CudaRefused, DriverApi
from legroom.messages import say
from legroom.system.processes_and_threads import room_for_threads, start_thread_at_once
from legroom.system.unix_sockets import FOLDER_FLAGS, listen, open_private_folder, require_same_user, unlink

LOCK = ".lock"
_LOCK_S, _SLOWEST, _POLL_S = 10.0, 0.5e9, 0.005  # for a copy that another process makes; bytes per second
_MOST_LISTED = 100  # copies in an answer
_MOST_NAME = 200
_RETRY_S = 0.1


@dataclass(eq=False, slots=True)
class SharedCopy:
    """GPU memory that several processes map. ``close`` unmaps it here; queued work must be done before."""

    key: str
    address: int
    size: int  # bytes that are mapped
    made_here: bool
    fd: int
    handle: int
    api: DriverApi
    server: _Server
    users: int = 1  # in this process
    about: dict[str, str] = field(default_factory=dict)  # what it is, for lists of copies
    pid: int = field(default_factory=os.getpid)

    def close(self) -> None:
        """End one use; the last one unmaps the memory and stops handing it on."""
        if self.fd < 0 or self.pid != os.getpid() or not self.server.withdraw(self):
            return
        fd, self.fd = self.fd, -1
        os.close(fd)
        self.api.enter()
        self.api.unmap(self.address, self.size)
        self.api.release(self.handle)


def share(
    api: DriverApi,
    store: Path,
    name: str,
    nbytes: int,
    fill: Callable[[int], None],
    *,
    check_room: Callable[[], None],
    title: str = "",
) -> SharedCopy:
    """The copy called ``name`` on this device: from a process that has it, else made here.

    ``fill`` writes ``nbytes`` to a device address and returns when they are there; ``check_room`` raises if the memory
    does not suffice. ``title`` names the copy in lists. CudaRefused says why memory cannot be shared here.
    """
    api.enter()
    if (why_not := api.why_no_shared_memory()) is not None:
        raise CudaRefused(why_not)
    folder = _open_folder(store)
    try:
        gpu = api.uuid()
        key = hashlib.sha256(f"{gpu} {name}".encode()).hexdigest()[:32]
        about = {"gpu": gpu, "name": _shortened(title or name)}
        size = -(-max(nbytes, 1) // (grain := api.granularity())) * grain
        server = _server(store / FOLDER)
        if (found := server.own(key, size) or _from_others(api, folder, key, size, server, about)) is not None:
            return found
        with _lock(folder, key, _LOCK_S + size / _SLOWEST):
            if (found := server.own(key, size) or _from_others(api, folder, key, size, server, about)) is not None:
                return found
            check_room()
            return _make(api, key, size, fill, server, about)
    finally:
        os.close(folder)


def _shortened(name: str) -> str:
    """The end of a name, so that a list fits in an answer: JSON takes six bytes for a letter that is not ASCII."""
    name = name[-_MOST_NAME:]
    while len(json.dumps(name)) > 2 * _MOST_NAME:
        name = name[len(name) // 4 + 1 :]
    return name


def _make(
    api: DriverApi, key: str, size: int, fill: Callable[[int], None], server: _Server, about: dict[str, str]
) -> SharedCopy:
    handle = api.create(size)
    with ExitStack() as undo:
        undo.callback(api.release, handle)
        address = api.map(handle, size, READ_WRITE)
        undo.callback(api.unmap, address, size)
        fill(address)
        with suppress(CudaRefused):  # a driver that maps for reading and writing only
            api.set_access(address, size, READ)
        fd = api.export(handle)
        undo.callback(os.close, fd)
        os.set_inheritable(fd, False)
        copy = server.offer(SharedCopy(key, address, size, True, fd, handle, api, server, about=about))
        undo.pop_all()
    return copy


def _adopt(api: DriverApi, key: str, size: int, fd: int, server: _Server, about: dict[str, str]) -> SharedCopy:
    with ExitStack() as undo:
        undo.callback(os.close, fd)
        handle = api.adopt(fd)
        undo.callback(api.release, handle)
        try:
            address = api.map(handle, size, READ)
        except CudaRefused:  # a driver that maps for reading and writing only
            address = api.map(handle, size, READ_WRITE)
        undo.callback(api.unmap, address, size)
        copy = server.offer(SharedCopy(key, address, size, False, fd, handle, api, server, about=about))
        undo.pop_all()
    return copy


# Asking other processes


def _from_others(
    api: DriverApi, folder: int, key: str, size: int, server: _Server, about: dict[str, str]
) -> SharedCopy | None:
    for answer, fd in ask_all(folder, {"want": key}, server.name, list_gpu_copies.PATIENCE_S):
        if fd is None:
            continue
        if answer.get("size") != size:  # another granularity: another driver version in another container
            os.close(fd)
            continue
        try:
            return _adopt(api, key, size, fd, server, about)
        except CudaRefused:
            continue  # a device that this process may not map: a copy of its own remains
    return None


# Handing copies on


class _Server:
    """The socket and the thread with which this process hands its copies on."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = f"{os.getpid()}-{secrets.token_hex(6)}{SOCKET}"
        self._copies: dict[str, SharedCopy] = {}
        self._lock = threading.Lock()
        self._listening: socket.socket | None = None
        self.pid = os.getpid()

    def offer(self, copy: SharedCopy) -> SharedCopy:
        """Hand this copy on from now on."""
        with self._lock:
            if self._listening is None:
                self._listen()
            self._copies[copy.key] = copy
        return copy

    def own(self, key: str, size: int) -> SharedCopy | None:
        """The copy that this process has already, with one more user."""
        with self._lock:
            copy = self._copies.get(key)
            if copy is None or copy.size != size:
                return None
            copy.users += 1
            return copy

    def withdraw(self, copy: SharedCopy) -> bool:
        """End one use. After the last one it is not handed on any more; the socket goes with the last copy."""
        with self._lock:
            copy.users -= 1
            if copy.users > 0:
                return False
            if self._copies.get(copy.key) is copy:
                del self._copies[copy.key]
            if not self._copies:
                self._stop()
            return True

    def _listen(self) -> None:
        try:
            folder = os.open(self.folder, FOLDER_FLAGS)
            try:
                listening = listen(folder, self.name)
            finally:
                os.close(folder)
        except OSError:  # too many open files, or a full /dev/shm
            return  # the copies are used here and not handed on
        self._listening = listening
        # Not waited for: a process that asks before the thread runs waits in the socket's queue.
        if not (room_for_threads(1) and start_thread_at_once(self._serve, listening)):
            self._stop()

    def _serve(self, listening: socket.socket) -> None:
        while True:
            try:
                there, _ = listening.accept()
            except OSError as problem:
                if problem.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS):
                    return  # closed
                time.sleep(_RETRY_S)  # the process that asks waits in the queue
                continue
            with there:
                try:
                    there.settimeout(list_gpu_copies.PATIENCE_S)
                    require_same_user(there)
                    self._answer(there, json.loads(there.recv(MESSAGE)))
                except (OSError, ValueError, TypeError):
                    continue

    def _answer(self, there: socket.socket, question: Any) -> None:
        if not isinstance(question, dict) or question.get("version") != VERSION:
            return
        with self._lock:
            if "list" in question:
                some = list(self._copies.items())[:_MOST_LISTED]
                copies, about = {key: copy.size for key, copy in some}, {key: copy.about for key, copy in some}
                there.send(json.dumps({"pid": self.pid, "copies": copies, "about": about}).encode())
                return
            copy = self._copies.get(str(question.get("want")))
            if copy is None or copy.fd < 0:
                there.send(b"{}")
            else:
                socket.send_fds(there, [json.dumps({"size": copy.size}).encode()], [copy.fd])

    def _stop(self) -> None:
        listening, self._listening = self._listening, None
        if listening is None:
            return
        try:
            os.unlink(self.folder / self.name)
        except OSError:
            pass
        try:
            listening.shutdown(socket.SHUT_RDWR)  # ends accept in the thread
        except OSError:
            pass
        listening.close()

    def stop_at_exit(self) -> None:
        """Remove the socket; the kernel frees the rest."""
        if self.pid == os.getpid() and self._lock.acquire(timeout=1):
            self._stop()

    def forget_in_child(self) -> None:
        """In a forked child: close what keeps the memory or the socket alive. CUDA cannot be used here."""
        if self._listening is not None:
            os.close(self._listening.detach())
        for copy in self._copies.values():
            fd, copy.fd = copy.fd, -1
            if fd >= 0:
                os.close(fd)
        self._copies.clear()


_servers: dict[Path, _Server] = {}
_servers_lock = threading.Lock()


def _server(folder: Path) -> _Server:
    with _servers_lock:
        found = _servers.get(folder)
        if found is None or found.pid != os.getpid():
            found = _servers[folder] = _Server(folder)
        return found


def _forget_in_child() -> None:
    global _servers_lock
    _servers_lock = threading.Lock()  # another thread may have held it while this one forked
    for server in _servers.values():
        server.forget_in_child()
    _servers.clear()


def _stop_at_exit() -> None:
    for server in _servers.values():
        server.stop_at_exit()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_in_child)
atexit.register(_stop_at_exit)


# The folder and its locks


def _open_folder(store: Path) -> int:
    path = store / FOLDER
    try:
        return open_private_folder(path)
    except OSError as problem:
        raise CudaRefused(say("{path}: {words}", path=path, words=problem.strerror)) from problem


@contextmanager
def _lock(folder: int, key: str, patience: float) -> Iterator[None]:
    """One process at a time makes a copy. The lock file is removed with the lock."""
    name = key + LOCK
    end = time.monotonic() + patience
    while (lock := _acquired(folder, name)) is None:
        if time.monotonic() > end:
            raise CudaRefused(
                say("another process has been copying it for {seconds:.0f} s and does not finish", seconds=patience)
            )
        time.sleep(_POLL_S)
    try:
        yield
    finally:
        unlink(folder, name)
        lock.release()


def _acquired(folder: int, name: str) -> locks.Lock | None:
    try:
        return locks.acquire(folder, name)
    except OSError as problem:  # too many open files, or a full /dev/shm
        raise CudaRefused(say("{path}: {words}", path=name, words=problem.strerror)) from problem
