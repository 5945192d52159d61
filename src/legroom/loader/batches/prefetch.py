"""Gathers the next batch in a thread while the consumer works on the current one, where that saves time.

A thread lives for one batch and ends by itself. Nothing has to be stopped when a loop is left early, at an exception,
at Ctrl-C or at exit. Starting a thread costs 0.05 ms.

Prefetching pays where both sides take time. For a consumer that does nothing with a batch it costs a quarter (batches
of 12 MB): another buffer is filled, which is not in the CPU cache. A consumer whose step takes as long as the copy
gains half. So both times are measured, in every loop anew.
"""

from __future__ import annotations

import _thread
import os
import time
from collections import deque
from collections.abc import Callable
from statistics import median
from typing import Any

import numpy as np

from legroom.loader.batches.gather import Batch, Gatherer

NDArray = np.ndarray[Any, Any]
_HANDOVER = 1e-4  # seconds: starting a thread and waiting for it
_COLDER = 0.25  # of a copy's time: the cost of filling a third buffer, which is not in the CPU cache
_LEAST_MEASURED = 3  # batches
_REMEMBERED = 9


def prefetch_pays(gathering: float, consuming: float) -> bool:
    """Whether doing both at once saves more seconds than it costs."""
    return min(gathering, consuming) > _HANDOVER + _COLDER * gathering


class Prefetcher:
    """Wraps a gatherer, which may be called from any thread, for one consumer."""

    def __init__(
        self,
        gatherer: Gatherer,
        background: Callable[[NDArray], Batch] | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """``background``: how to gather while the consumer works."""
        self.path, self.why = gatherer.path, gatherer.why
        self._gather, self._background, self._clock = gatherer.gather, background or gatherer.gather, clock
        self._gathering: deque[float] = deque(maxlen=_REMEMBERED)
        self._consuming: deque[float] = deque(maxlen=_REMEMBERED)
        self._returned: float | None = None
        self._pending: _Pending | None = None

    def gather(self, rows: NDArray) -> Batch:
        asked = self._clock()
        if self._returned is not None:
            self._consuming.append(asked - self._returned)
        pending, self._pending = self._pending, None
        if pending is not None and pending.is_for(rows):
            batch = pending.result()
            self._gathering.append(pending.seconds)
            self._returned = self._clock()
        else:
            batch = self._gather(rows)
            self._returned = self._clock()
            self._gathering.append(self._returned - asked)
        return batch

    def begin(self, rows: NDArray) -> None:
        """Start gathering these rows where measurements show that it pays."""
        if len(self._consuming) < _LEAST_MEASURED or max(self._consuming) < _HANDOVER:
            return  # the second check saves a fast consumer the two medians
        if not prefetch_pays(median(self._gathering), median(self._consuming)):
            return
        pending = _Pending(rows)
        try:
            _thread.start_new_thread(pending.fill, (self._background, self._clock))
        except RuntimeError:  # no thread can be started: the batch is gathered when it is asked for
            return
        self._pending = pending
        self._returned = self._clock()

    def close(self) -> None:
        """Drop the pending batch; its thread ends by itself."""
        self._pending = None


class _Pending:
    """A batch that another thread gathers."""

    def __init__(self, rows: NDArray) -> None:
        self.seconds = 0.0
        self._rows, self._pid = rows, os.getpid()
        self._batch: Batch | None = None
        self._problem: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()

    def is_for(self, rows: NDArray) -> bool:
        """Whether it gathers this array of rows; a forked child has the object but not the thread."""
        return rows is self._rows and self._pid == os.getpid()

    def fill(self, gather: Callable[[NDArray], Batch], clock: Callable[[], float]) -> None:
        try:
            start = clock()
            self._batch = gather(self._rows)
            self.seconds = clock() - start
        except BaseException as problem:
            self._problem = problem  # raised in the thread that asks for the batch
        finally:
            self._done.release()

    def result(self) -> Batch:
        with self._done:
            if self._problem is not None:
                raise self._problem
            assert self._batch is not None
            batch, self._batch = self._batch, None
            return batch
