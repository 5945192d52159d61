"""A socket beside a loader's queue, through which a worker hands over the descriptor of each new slot.

To open a worker's slot by way of /proc needs the right to trace that process. A program loses it when it changes its
user, or when its workers do; a descriptor that was sent needs no right, and outlives the worker that sent it. Where
none came, /proc is tried.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import threading
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_NUMBER = 8  # bytes
_RIGHTS = 64  # bytes for one descriptor, and its header
# Not socket.recv_fds, which leaves out its flags in some versions of Python, and would wait for ever.
_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_CMSG_CLOEXEC", 0)


class Descriptors:
    """Both ends, as the program has them; a worker uses only the sending one."""

    def __init__(self) -> None:
        from multiprocessing.connection import Connection

        receiving, sending = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiving: Connection | None = Connection(receiving.detach())
        self._sending = Connection(sending.detach())
        self._begin()

    def _begin(self) -> None:
        self._sent: set[int] = set()
        self._came: dict[int, int] = {}  # a slot's number → its descriptor here
        self._lock = threading.Lock()

    def __getstate__(self) -> Connection:
        return self._sending

    def __setstate__(self, sending: Connection) -> None:
        self._receiving, self._sending = None, sending
        self._begin()

    def send(self, number: int, fd: int) -> None:
        """In a worker: hand over a slot's descriptor, once; left out where it would have to wait."""
        if number in self._sent:
            return
        self._sent.add(number)
        with contextlib.suppress(OSError), _socket(self._sending) as out:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
            out.sendmsg([number.to_bytes(_NUMBER, "little")], [rights], socket.MSG_DONTWAIT)

    def take(self, number: int) -> int | None:
        """The descriptor of a slot, which the caller closes; None where it did not come."""
        with self._lock:
            if number not in self._came and self._receiving is not None:
                with contextlib.suppress(OSError), _socket(self._receiving) as sock:
                    while number not in self._came:
                        name, rights, _, _ = sock.recvmsg(_NUMBER, _RIGHTS, _FLAGS)
                        if not name or not rights:
                            break
                        self._came[int.from_bytes(name, "little")] = array("i", rights[0][2])[0]
            return self._came.pop(number, None)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return  # the descriptors go with the process
        for fd in getattr(self, "_came", {}).values():
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def _socket(end: Connection) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=end.fileno())
    try:
        yield sock
    finally:
        sock.detach()
