"""Rows copied by several threads at once, where that turns out to be faster.

Covers: dividing one copy, and measuring how many threads it is worth. Does not cover: which rows, or where to
(gather.py).

One core does not fill a machine's memory bandwidth: with two, batches of 12 MB come a sixth faster (AMD EPYC), and
batches of 1.5 MB a quarter slower, because a thread has to be started and waited for. So each number of threads is
tried a few times and the fastest stays. Threads live for one copy, like those of prefetch.py, and for the same reason.
"""

from __future__ import annotations

import _thread
import time
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import numpy as np

from legroom.cpus import usable_cpus

NDArray = np.ndarray[Any, Any]
_WORTH_A_LOOK = 1 << 20  # bytes: below, starting a thread takes longer than the copy
_MOST = 8
_LOOKED = 3  # times each, the first of which may have met fresh memory


class Copier:
    """Copies rows of one array, again and again, with as many threads as have been the fastest so far."""

    def __init__(self, source: NDArray, clock: Callable[[], float] = time.perf_counter) -> None:
        self._source, self._clock = source, clock
        self._choices = _choices(usable_cpus())
        self._least = dict.fromkeys(self._choices, float("inf"))
        self._left = [hands for hands in self._choices for _ in range(_LOOKED)]
        self._measured = 0  # rows: batches of another size are no comparison

    def copy(self, rows: NDArray, out: NDArray, *, alone: bool = False) -> None:
        """The rows into ``out``; ``alone`` where the other CPUs have something else to do."""
        if alone or len(rows) < 2 or out.nbytes < _WORTH_A_LOOK or len(self._choices) == 1:
            np.take(self._source, rows, axis=0, out=out, mode="clip")
            return
        if not self._left:
            _copied(self._source, rows, out, min(self._least, key=self._least.__getitem__))
            return
        self._measured = max(self._measured, len(rows))
        hands = self._left[-1]
        start = self._clock()
        _copied(self._source, rows, out, hands)
        seconds = self._clock() - start
        if len(rows) == self._measured:
            self._left.pop()
            self._least[hands] = min(self._least[hands], seconds)


def _choices(cpus: int) -> list[int]:
    """1, 2, 4 … threads, no more than there are CPUs."""
    return [hands for hands in (1, 2, 4, _MOST) if hands <= max(1, cpus)]


def _copied(source: NDArray, rows: NDArray, out: NDArray, hands: int) -> None:
    borders = [len(rows) * part // hands for part in range(hands + 1)]
    parts = [slice(first, last) for first, last in pairwise(borders) if first < last]
    others = [_Part(source, rows[part], out[part]) for part in parts[1:]]
    try:
        np.take(source, rows[parts[0]], axis=0, out=out[parts[0]], mode="clip")
    finally:
        # Whatever happened here: nobody may have this memory while others write to it.
        for other in others:
            other.wait()


class _Part:
    """One thread's share, begun."""

    def __init__(self, source: NDArray, rows: NDArray, out: NDArray) -> None:
        self._source, self._rows, self._out = source, rows, out
        self._problem: BaseException | None = None
        self._done = _thread.allocate_lock()
        self._done.acquire()
        try:
            _thread.start_new_thread(self._copy, ())
        except RuntimeError:  # no thread is to be had: done here and now
            self._copy()

    def _copy(self) -> None:
        try:
            np.take(self._source, self._rows, axis=0, out=self._out, mode="clip")
        except BaseException as problem:
            self._problem = problem  # belongs to whoever waits
        finally:
            self._done.release()

    def wait(self) -> None:
        with self._done:
            if self._problem is not None:
                raise self._problem
