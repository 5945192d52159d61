"""Queues between a loader and its workers that need no thread for small messages, and an event without a lock.

Covers: contexts of multiprocessing whose queues write small messages at once and whose events take no lock.
Does not cover: what is sent (pack.py, inbox.py).

multiprocessing hands every message to a thread that writes it, so that nobody who puts ever waits for a pipe. Waking
that thread costs more than the writing: with batches of 32 kB a quarter of all CPU time. Here a message is written by
whoever puts it, if the pipe has room for it at that moment; where it has not, or the message is large, it goes to the
thread as ever, and so do all that follow it in that queue. So nobody waits here either, and messages keep their order.

What goes to the thread after all is pickled again there. So only messages are tried of which it is known that this
has no effect: row numbers, and batches in slots. A tensor that torch sends is another matter: each time it is pickled a
descriptor waits for somebody to fetch it.
"""

from __future__ import annotations

import contextlib
import errno
import multiprocessing
import select
import time
from functools import cache
from multiprocessing.context import BaseContext
from multiprocessing.reduction import ForkingPickler
from typing import Any

from legroom.loader.arena.descriptors import Descriptors
from legroom.loader.arena.inbox import look_among
from legroom.loader.arena.sent import Sent

_HEADER = 4  # bytes that a connection writes before a small message
_POLL_S = 0.01
_LOCK_S = 1.0  # a worker that was killed while it held the lock of a queue never releases it


class _Direct:
    """What a queue of multiprocessing is mixed with: it writes by itself what a pipe takes without delay."""

    descriptors: Descriptors | None = None  # of slots whose batches come through this queue

    def put(self, obj: Any, block: bool = True, timeout: float | None = None) -> None:
        descriptors = self.descriptors
        if descriptors is not None and type(obj) is tuple and len(obj) == 2 and type(obj[1]) is Sent:
            obj[1].hand_over(descriptors)
        if not self._put_now(obj):
            super().put(obj, block, timeout)  # type: ignore[misc]

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        if self.descriptors is None:
            return super().get(block, timeout)  # type: ignore[misc]
        before = look_among(self.descriptors)
        try:
            return super().get(block, timeout)  # type: ignore[misc]
        finally:
            look_among(before)

    def __getstate__(self) -> Any:
        return super().__getstate__(), self.descriptors

    def __setstate__(self, state: Any) -> None:
        inner, self.descriptors = state
        super().__setstate__(inner)  # type: ignore[misc]

    def _put_now(self, obj: Any) -> bool:
        inner: Any = self  # the names below are multiprocessing's own
        if inner._closed or inner._thread is not None or not _harmless(obj):
            return False
        message = ForkingPickler.dumps(obj)
        if len(message) + _HEADER > select.PIPE_BUF:
            return False
        if not inner._wlock.acquire(timeout=_LOCK_S):
            return False  # the thread waits for it: the worker still ends when its loader does
        try:
            if not _has_room(inner._writer.fileno()) or not inner._sem.acquire(False):
                return False
            inner._writer.send_bytes(message)
        except BrokenPipeError:
            pass  # nothing reads it any more: multiprocessing's thread drops it as well
        except OSError as problem:
            # The message to end, from a loader that is collected together with its pipes: they may be closed first.
            if obj is not None or problem.errno != errno.EBADF:
                raise
        finally:
            inner._wlock.release()
        return True


class LockFreeEvent:
    """An event of multiprocessing without a lock, so a process that is killed in any of its methods blocks no other.

    multiprocessing's own takes a lock in ``is_set`` too. Each worker calls that once a batch. A worker that is killed
    there leaves the lock taken, and the loader then waits for ever in ``set``.
    """

    def __init__(self, context: BaseContext) -> None:
        self._flag: Any = context.Semaphore(0)  # its value is read by torch_internals.workers_ending, too

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
            time.sleep(_POLL_S)
        return self.is_set()


def _harmless(message: Any) -> bool:
    """Whether it is of torch's loader's kind (a number and something), and may be pickled more than once."""
    if not isinstance(message, tuple) or len(message) != 2:
        return message is None
    what = message[1]
    if isinstance(what, list):  # rows of a batch; None for each where the dataset is iterated over
        return not what or what[0] is None or isinstance(what[0], int)
    return what is None or isinstance(what, (int, Sent))


def _has_room(pipe: int) -> bool:
    """Whether PIPE_BUF bytes can be written without delay."""
    looking = select.poll()
    looking.register(pipe, select.POLLOUT)
    return bool(looking.poll(0))


def direct(context: BaseContext) -> BaseContext:
    """A context like this one with such queues; the same where it is not one of multiprocessing's own, or no Unix."""
    for kind in _kinds():
        if type(context) is kind.__bases__[1]:
            return kind()
    return context


@cache
def _kinds() -> list[type[BaseContext]]:
    if not hasattr(select, "PIPE_BUF") or not hasattr(select, "poll"):
        return []
    return [
        type(f"Direct{name}", (_Context, type(multiprocessing.get_context(name))), {})
        for name in multiprocessing.get_all_start_methods()
    ]


class _Context:
    _first = True  # no queue was made

    def Queue(self, maxsize: int = 0) -> Any:  # noqa: N802 multiprocessing's name
        context: Any = self
        queue = _queue_class()(maxsize, ctx=context.get_context())
        if self._first:  # torch makes the one for batches before those for row numbers
            self._first = False
            with contextlib.suppress(OSError):
                queue.descriptors = Descriptors()
        return queue

    def Event(self) -> LockFreeEvent:  # noqa: N802 multiprocessing's name
        context: Any = self
        return LockFreeEvent(context.get_context())


@cache
def _queue_class() -> type[Any]:
    """Made when it is needed: multiprocessing's queues cannot be imported everywhere."""
    from multiprocessing.queues import Queue

    names = {"__module__": __name__, "__qualname__": "DirectQueue", "__doc__": _Direct.__doc__}
    return type("DirectQueue", (_Direct, Queue), names)


def __getattr__(name: str) -> Any:
    if name == "DirectQueue":  # by which workers that are not forked find it
        return _queue_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
