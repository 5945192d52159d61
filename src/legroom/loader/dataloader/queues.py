"""Queues between a loader and its workers that write small messages without a thread, and an event without a lock.

All private fields of multiprocessing are used here. Where a Python version lacks them, multiprocessing's own queue or
event is used.

multiprocessing passes every message to a thread that writes it, so that ``put`` never waits for the pipe. Waking the
thread costs more than the write: with batches of 32 kB a quarter of all CPU time. Here ``put`` writes the message
itself if the pipe has space at that moment. Otherwise, or if the message is large, it goes to the thread, and so do all
that follow it in that queue. So ``put`` does not wait here either, and messages keep their order.

A message that goes to the thread is pickled again. So only messages are tried for which that has no effect: sample
indices, and batches in slots. A tensor that torch sends is different: each time it is pickled, a file descriptor waits
to be fetched.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import select
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any

from legroom.loader.dataloader.receive import SentBatch, use_descriptors
from legroom.loader.dataloader.torch_internals import is_resume_message
from legroom.system.lazy_and_optional_imports import import_lock

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

_LENGTH_BYTES = 4  # that a connection writes before a small message
_EVENT_POLL_S = 0.01
_LOCK_S = 1.0  # a worker that was killed while it held the lock of a queue never releases it
_QUEUE_FIELDS = ("_closed", "_sem", "_thread", "_wlock", "_writer")
_ID_BYTES = 8
_FD_SPACE = 64  # bytes for one descriptor and its header
# Not socket.recv_fds, which ignores its flags in some Python versions, and would then wait.
_RECEIVE_FLAGS = getattr(socket, "MSG_DONTWAIT", 0) | getattr(socket, "MSG_CMSG_CLOEXEC", 0)


def direct_context(context: BaseContext) -> BaseContext:
    """A context like this one with such queues; the same one if it is not multiprocessing's, or without Unix pipes."""
    for kind in _contexts():
        if type(context) is kind.__bases__[1]:
            return kind()
    return context


@cache
def _contexts() -> list[type[BaseContext]]:
    if not hasattr(select, "PIPE_BUF") or not hasattr(select, "poll"):
        return []
    return [
        type(f"Direct{name}", (_Context, type(multiprocessing.get_context(name))), {})
        for name in multiprocessing.get_all_start_methods()
    ]


class _Context:
    _first = True  # no queue was made yet

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 multiprocessing's name
        context: Any = self
        queue = _queue_class()(maxsize, ctx=context.get_context())
        if not all(hasattr(queue, name) for name in _QUEUE_FIELDS):
            return super().Queue(maxsize)  # type: ignore[misc]
        if self._first:  # torch makes the one for batches before those for indices
            self._first = False
            with contextlib.suppress(OSError):
                queue.descriptors = Descriptors()
        return queue

    def Process(self, *args: Any, **kwargs: Any) -> Any:  # noqa: N802 multiprocessing's name
        """Keeps its queues: multiprocessing keeps each process until it is joined.

        A loader in a cycle is collected together with its queues. If the pipe of one were closed before the loader
        sends the message to end through it, the message would be lost, and the worker be waited for until it is
        terminated.
        """
        process = super().Process(*args, **kwargs)  # type: ignore[misc]
        process.queues = [one for one in kwargs.get("args", ()) if isinstance(one, _queue_class())]
        return process

    def Event(self) -> Any:  # noqa: N802 multiprocessing's name
        context: Any = self
        flag = context.get_context().Semaphore(0)
        if not hasattr(getattr(flag, "_semlock", None), "_is_zero"):
            return super().Event()  # type: ignore[misc]
        return LockFreeEvent(flag)


@cache
def _queue_class() -> type[Any]:
    """Made when it is needed: multiprocessing.queues cannot be imported on every platform."""
    with import_lock:
        from multiprocessing.queues import Queue

    names = {"__module__": __name__, "__qualname__": "DirectQueue", "__doc__": _DirectQueue.__doc__}
    return type("DirectQueue", (_DirectQueue, Queue), names)


def __getattr__(name: str) -> Any:
    if name == "DirectQueue":  # workers that are not forked find the class by this name
        return _queue_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _DirectQueue:
    """A mix-in for multiprocessing's Queue: ``put`` writes what the pipe accepts without delay."""

    descriptors: Descriptors | None = None  # of the slots whose batches are sent through this queue

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        descriptors = self.descriptors
        if descriptors is not None and type(obj) is tuple and len(obj) == 2 and type(obj[1]) is SentBatch:
            obj[1].send_descriptor(descriptors)
        if not self._put_now(obj):
            super().put(obj, block, timeout)  # type: ignore[misc]

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.descriptors is None:
            return super().get(block, timeout)  # type: ignore[misc]
        before = use_descriptors(self.descriptors)
        try:
            return super().get(block, timeout)  # type: ignore[misc]
        finally:
            use_descriptors(before)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.descriptors

    def __setstate__(self, state: Any) -> None:
        inner, self.descriptors = state
        super().__setstate__(inner)  # type: ignore[misc]

    def _put_now(self, obj: Any) -> bool:
        inner: Any = self  # the fields below are multiprocessing's
        if inner._closed or inner._thread is not None or not _repeatable(obj):
            return False
        message = ForkingPickler.dumps(obj)
        if len(message) + _LENGTH_BYTES > select.PIPE_BUF:
            return False
        if not inner._wlock.acquire(timeout=_LOCK_S):
            return False  # the thread waits for the lock: the worker still ends with its loader
        try:
            if not _has_space(inner._writer.fileno()) or not inner._sem.acquire(False):
                return False
            inner._writer.send_bytes(message)
        except BrokenPipeError:
            pass  # no process reads the pipe any more: multiprocessing's thread drops the message as well
        finally:
            inner._wlock.release()
        return True


def _repeatable(message: Any) -> bool:
    """Whether it is a message of torch's loader (a number and a value) that can be pickled more than once."""
    if not isinstance(message, tuple) or len(message) != 2:
        return message is None or is_resume_message(message)
    value = message[1]
    if isinstance(value, list):  # indices of a batch; None for each sample of an IterableDataset
        return not value or value[0] is None or _is_integer(value[0])
    return value is None or isinstance(value, SentBatch) or _is_integer(value)


def _is_integer(value: Any) -> bool:
    """Whether it is an integer, also of numpy. A tensor is not: pickling it passes on a file descriptor."""
    return isinstance(value, int) or (hasattr(type(value), "__index__") and not hasattr(value, "untyped_storage"))


def _has_space(pipe: int) -> bool:
    """Whether PIPE_BUF bytes can be written without delay; a closed descriptor is not taken for a pipe with space."""
    poll = select.poll()
    poll.register(pipe, select.POLLOUT)
    return any(not found & select.POLLNVAL for _, found in poll.poll(0))


class LockFreeEvent:
    """An event of multiprocessing without a lock, so a process that is killed in any of its methods blocks no other.

    multiprocessing's own takes a lock in ``is_set`` too, which each worker calls once per batch. A worker that is
    killed there leaves the lock taken, and the loader then waits forever in ``set``.
    """

    def __init__(self, flag: Any) -> None:
        self._flag = flag  # a semaphore; torch_internals.workers_ending reads it, too

    def is_set(self) -> bool:
        return not self._flag._semlock._is_zero()

    def set(self) -> None:
        if not self.is_set():
            self._flag.release()

    def clear(self) -> None:
        while self._flag.acquire(False):
            pass

    def wait(self, timeout: float | None = None) -> bool:
        until = None if timeout is None else time.monotonic() + timeout
        while not self.is_set() and (until is None or time.monotonic() < until):
            time.sleep(_EVENT_POLL_S)
        return self.is_set()


class Descriptors:
    """A socket beside the queue, through which a worker sends the file descriptor of each new slot.

    To open a worker's slot through /proc needs the right to trace that process. A program loses it when it changes its
    user, or when its workers do. A descriptor that was sent needs no right, and stays valid after its worker has ended.
    Where none was received, /proc is tried. The program has both ends; a worker uses only the sending one.
    """

    def __init__(self) -> None:
        with import_lock:
            from multiprocessing.connection import Connection

        receiver, sender = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._receiver: Connection | None = Connection(receiver.detach())
        self._sender = Connection(sender.detach())
        self._reset()

    def _reset(self) -> None:
        self._sent: set[int] = set()
        self._received: dict[int, int] = {}  # id of a slot → its descriptor in this process
        self._lock = threading.Lock()

    def __getstate__(self) -> Connection:
        return self._sender

    def __setstate__(self, sender: Connection) -> None:
        self._receiver, self._sender = None, sender
        self._reset()

    def send(self, slot_id: int, fd: int) -> None:
        """In a worker: send the descriptor of a slot, once; skipped if that would have to wait."""
        if slot_id in self._sent:
            return
        self._sent.add(slot_id)
        with contextlib.suppress(OSError), _socket(self._sender) as sock:
            rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array("i", [fd]))
            sock.sendmsg([slot_id.to_bytes(_ID_BYTES, "little")], [rights], socket.MSG_DONTWAIT)

    def take(self, slot_id: int) -> int | None:
        """The descriptor of a slot, which the caller closes; None if it was not received."""
        with self._lock:
            if slot_id not in self._received and self._receiver is not None:
                with contextlib.suppress(OSError), _socket(self._receiver) as sock:
                    while slot_id not in self._received:
                        name, rights, _, _ = sock.recvmsg(_ID_BYTES, _FD_SPACE, _RECEIVE_FLAGS)
                        if not name or not rights:
                            break
                        self._received[int.from_bytes(name, "little")] = array("i", rights[0][2])[0]
            return self._received.pop(slot_id, None)

    def __del__(self, at_exit: Callable[[], bool] = sys.is_finalizing) -> None:
        if at_exit():
            return  # the kernel closes the descriptors
        for fd in getattr(self, "_received", {}).values():
            with contextlib.suppress(OSError):
                os.close(fd)


@contextlib.contextmanager
def _socket(end: Connection) -> Iterator[socket.socket]:
    sock = socket.socket(fileno=end.fileno())
    try:
        yield sock
    finally:
        sock.detach()
