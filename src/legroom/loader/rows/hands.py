"""Rows copied by several threads at once, where that turns out to be faster.

Covers: dividing one copy, and measuring how many threads it is worth. Does not cover: which rows, or where to
(gather.py).

One core does not fill a machine's memory bandwidth: with two, batches of 12 MB come a sixth faster (AMD EPYC), and
batches of 1.5 MB a quarter slower, because a thread has to be started and waited for. So each number of threads is
tried a few times and the fastest stays, for all copies of about that size in this process. Threads live for one copy,
like those of prefetch.py, and for the same reason.
"""

from __future__ import annotations

import _thread
import time
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np

from legroom.system.cpus import usable_cpus

NDArray = np.ndarray[Any, Any]
_WORTH_A_LOOK = 1 << 20  # bytes: below, starting a thread takes longer than the copy
_MOST = 8
_LOOKED = 3  # times each, the first of which may have met fresh memory
_clock = time.perf_counter


class Copier:
    """Copies rows of one array, again and again, with as many threads as have been the fastest so far."""

    def __init__(self, source: NDArray) -> None:
        self._source = source

    def copy(self, rows: NDArray, out: NDArray, *, alone: bool = False) -> None:
        """The rows into ``out``; ``alone`` where the other CPUs have something else to do."""
        if alone or len(rows) < 2 or out.nbytes < _WORTH_A_LOOK:
            np.take(self._source, rows, axis=0, out=out, mode="clip")
            return
        row = out.nbytes // len(rows)
        trials = _trials(out.nbytes.bit_length(), row.bit_length())
        hands = trials.next()
        start = _clock()
        _copied(self._source, rows, out, hands)
        if trials.open:
            trials.took(hands, (_clock() - start) / out.nbytes)


class _Trials:
    """How long copies of one size took with each number of threads."""

    def __init__(self, choices: list[int]) -> None:
        self._least = dict.fromkeys(choices, float("inf"))
        self._left = dict.fromkeys(choices, _LOOKED if len(choices) > 1 else 0)
        self.open = len(choices) > 1
        self._best = choices[0]

    def next(self) -> int:
        """How many threads to take now; in turn while there is something to learn."""
        return max(self._left, key=self._left.__getitem__) if self.open else self._best

    def took(self, hands: int, seconds: float) -> None:
        """Seconds a byte."""
        self._left[hands] -= 1
        self._least[hands] = min(self._least[hands], seconds)
        self._best = min(self._least, key=self._least.__getitem__)
        self.open = any(left > 0 for left in self._left.values())


@cache
def _trials(_size: int, _row: int) -> _Trials:
    """The same for all copies whose sizes, and their rows', lie between the same powers of two."""
    return _Trials(_choices(usable_cpus()))


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
