"""Samples become moments, and every output gets each of them.

Covers: sampling at an even pace, judging, handing on. Does not cover: where moments go (one file an output).

This is the seam: whatever shows or keeps a watch is an Output, and whatever gives samples (the sampler, a log that
is replayed, a test) can be the source.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol

from legroom.model import Moment, Sample
from legroom.monitor.alarms import Watchman
from legroom.monitor.history import History


class Output(Protocol):
    """Something that shows or keeps moments. It may be slow to show, not to take: the next sample waits for it."""

    def show(self, moment: Moment) -> None: ...

    def close(self) -> None: ...


class Stream:
    """Moments, from any source of samples; ``history`` is what has been seen so far."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples
        self._watchman = Watchman()

    @property
    def history(self) -> History:
        """Everything seen so far, in bounded memory."""
        return self._watchman.history

    def __iter__(self) -> Iterator[Moment]:
        for sample in self._samples:
            self._watchman.history.add(sample)
            yield self._watchman.judge()


def paced(
    take: Callable[[], Sample | None],
    interval: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Sample]:
    """A sample at every beat until there is none, or ``stop`` is set; a beat that was missed is left out."""
    beat = clock()
    while not stop.is_set():
        sample = take()
        if sample is None:
            return
        yield sample
        now = clock()
        beat += interval
        if beat < now:  # too slow, or the machine slept
            beat = now + interval - (now - beat) % interval
        stop.wait(beat - now)


def drive(stream: Iterable[Moment], outputs: Sequence[Output]) -> Moment | None:
    """Hand every moment to every output, and close them at the end whatever ends it; the last moment."""
    last = None
    try:
        for last in stream:
            for output in outputs:
                output.show(last)
    finally:
        for output in outputs:
            output.close()
    return last
