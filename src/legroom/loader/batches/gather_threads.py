"""Threads that prepare batches beside a training loop, with as few Python instructions as possible.

A loop that is bound by launching kernels holds the interpreter's lock most of the time. Each time a helper needs the
lock, one of both waits. So a helper gets one large copy per batch, not many small ones, and is woken by a lock, not by
a Future.
"""

from __future__ import annotations

import _thread
import threading
import weakref
from collections.abc import Callable
from itertools import pairwise
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import numpy as np

from legroom.system.processes_and_threads import room_for_threads, start_daemon_thread, usable_cpus

NDArray = np.ndarray[Any, Any]
T = TypeVar("T")
_MOST_THREADS = 8
_LEAST_PART = 512 << 10  # bytes per thread: below, waking it takes longer than the copy
_END_S = 60.0  # for a thread to end its last copy


class Task(Generic[T]):
    """A call in another thread; ``result`` waits for it."""

    __slots__ = ("_call", "_done", "_problem", "_value")

    def __init__(self, call: Callable[[], T]) -> None:
        self._call: Callable[[], T] | None = call
        self._value: T | None = None
        self._problem: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def run(self) -> None:
        call, self._call = self._call, None
        assert call is not None
        try:
            self._value = call()
        except BaseException as problem:
            self._problem = problem  # raised in the thread that waits
        finally:
            self._done.release()

    def result(self) -> T:
        with self._done:
            if self._problem is not None:
                raise self._problem
            value: T = self._value  # type: ignore[assignment]
            return value


class TaskThread:
    """One thread that runs tasks in order. Where none can be started, tasks run at once."""

    def __init__(self, name: str) -> None:
        self._tasks: SimpleQueue[Task[Any] | None] = SimpleQueue()
        self._thread = start_daemon_thread(_runner(self._tasks), name)
        # At exit too: memory that a thread writes to must not be freed under it.
        self._stop = weakref.finalize(self, _stop, self._tasks, self._thread)

    def start(self, call: Callable[[], T]) -> Task[T]:
        """Run this call after those before it."""
        task = Task(call)
        if self._thread is None:
            task.run()
        else:
            self._tasks.put(task)
        return task

    def stop(self) -> None:
        """End the thread after its tasks; waits, unless it is this one."""
        self._stop()


def _runner(tasks: SimpleQueue[Task[Any] | None]) -> Callable[[], None]:
    """What the thread does; it refers to nothing else, so that its owner can be freed."""

    def run() -> None:
        while (task := tasks.get()) is not None:
            task.run()
            del task

    return run


def _stop(tasks: SimpleQueue[Task[Any] | None], thread: threading.Thread | None) -> None:
    tasks.put(None)
    if thread is not None and thread is not threading.current_thread() and thread.is_alive():
        thread.join(_END_S)


class RowThreads:
    """Threads that copy rows of arrays into page-locked memory, each one part of a batch."""

    def __init__(self) -> None:
        helpers = max(0, min(_MOST_THREADS, usable_cpus()) - 1)
        self._helpers = [TaskThread("legroom-gather") for _ in range(helpers)] if room_for_threads(helpers) else []

    def copy(self, column: NDArray, rows: NDArray, into: NDArray) -> None:
        """Copy these rows of a column, as bytes; this thread copies a part too."""
        if not into.nbytes:
            return
        parts = max(1, min(1 + len(self._helpers), into.nbytes // _LEAST_PART, len(rows)))
        if parts == 1:
            take_rows(column, rows, into)
            return
        row = into.nbytes // len(rows)
        borders = [len(rows) * part // parts for part in range(parts + 1)]
        (first, last), *others = pairwise(borders)
        waiting = [
            helper.start(_taking(column, rows[start:end], into[start * row : end * row]))
            for helper, (start, end) in zip(self._helpers, others, strict=False)
        ]
        try:
            take_rows(column, rows[first:last], into[first * row : last * row])
        finally:
            # Also after an exception: the memory must not be used again while other threads write to it.
            for task in waiting:
                task.result()

    def stop(self) -> None:
        """End the threads."""
        for helper in self._helpers:
            helper.stop()


def _taking(column: NDArray, rows: NDArray, into: NDArray) -> Callable[[], None]:
    return lambda: take_rows(column, rows, into)


def take_rows(column: NDArray, rows: NDArray, into: NDArray) -> None:
    """Copy some rows of a column as bytes; numpy releases the interpreter's lock meanwhile."""
    count = len(rows)
    if not column.flags.c_contiguous:  # numpy would make a contiguous copy of all of it
        into.reshape(count, -1)[:] = np.ascontiguousarray(column[rows]).reshape(count, -1).view(np.uint8)
        return
    whole = column.reshape(len(column), -1).view(np.uint8)
    np.take(whole, rows, axis=0, out=into.reshape(count, -1), mode="clip")
