"""Messages between a producer and the trainers of its group, with file descriptors, over a Unix socket.

A connection is also the trainer's lease: the kernel closes it with the process, however that ends. A forked child
closes its copy, so that it does not keep the lease of a trainer that was killed.

Messages are pickled. Both ends have checked that the other belongs to the same user before they read one.

    trainer → producer    hello, want, at, release, keep, leave, alone, status
                          gpu, claim, mapped, copied, read, no-copy, no-ring: of batches on a GPU
    producer → trainer    welcome, batch, end, wait, miss, error, forget, alone, status, gpu
"""

from __future__ import annotations

import os
import pickle
import select
import socket
import sys
import weakref
from array import array
from collections.abc import Callable, Sequence
from typing import Any

_MESSAGE = 96 << 10
INLINE = 32 << 10  # bytes of a batch's pickle that are sent in the message; larger ones are sent in a memfd
_FD_SPACE = socket.CMSG_SPACE(2 * array("i").itemsize) if hasattr(socket, "CMSG_SPACE") else 64
_all: weakref.WeakSet[Connection] = weakref.WeakSet()


class Closed(Exception):
    """The process at the other end is gone."""


def _received(sock: socket.socket) -> tuple[bytes, list[tuple[int, int, bytes]], int, Any]:
    flags = socket.MSG_DONTWAIT | socket.MSG_CMSG_CLOEXEC
    try:
        return sock.recvmsg(_MESSAGE, _FD_SPACE, flags)
    except ConnectionResetError:
        # It ended without reading what was sent to it. The kernel reports that once, before its last messages.
        return sock.recvmsg(_MESSAGE, _FD_SPACE, flags)


class Connection:
    """One end of a connection."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self.socket = sock
        self._sock: socket.socket | None = sock
        _all.add(self)

    def fileno(self) -> int:
        """For select."""
        return -1 if self._sock is None else self._sock.fileno()

    @property
    def open(self) -> bool:
        return self._sock is not None

    def send(self, *message: Any, fds: Sequence[int] = ()) -> bool:
        """Send without waiting; False if the other end has not read what was sent before."""
        sock = self._sock  # another thread may close it
        if sock is None:
            raise Closed
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", fds))] if fds else []
        try:
            sock.sendmsg([pickle.dumps(message, 5)], rights, socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
        except BlockingIOError:
            return False
        except OSError as problem:
            raise Closed from problem
        return True

    def wait(self, timeout: float) -> bool:
        """Whether there is a message, within so many seconds."""
        sock = self._sock
        if sock is None:
            raise Closed
        poll = select.poll()
        poll.register(sock, select.POLLIN)
        return bool(poll.poll(timeout * 1000))

    def receive(self, timeout: float = 0.0) -> tuple[tuple[Any, ...], list[int]] | None:
        """The next message and its descriptors; None if there is none after ``timeout`` seconds."""
        if timeout and not self.wait(timeout):
            return None
        sock = self._sock
        if sock is None:
            raise Closed
        try:
            data, ancillary, _, _ = _received(sock)
        except BlockingIOError:
            return None
        except OSError as problem:
            raise Closed from problem
        fds = [fd for _, kind, rights in ancillary if kind == socket.SCM_RIGHTS for fd in array("i", rights)]
        if not data:
            raise Closed
        try:
            message = pickle.loads(data)
        except Exception as problem:
            for fd in fds:
                os.close(fd)
            raise Closed from problem
        return message, fds

    def close(self) -> None:
        """Calling it again does nothing."""
        sock, self._sock = self._sock, None
        if sock is not None:
            sock.close()

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if not at_exit():
            self.close()


def _close_in_child() -> None:
    for connection in list(_all):
        connection.close()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_child)
