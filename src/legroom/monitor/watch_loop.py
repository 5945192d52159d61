"""Samples become moments, and every output gets each of them.

Covers: sampling at an even pace, judging, handing on. Does not cover: where moments go (one file an output).

This is the seam: whatever shows or keeps a watch is an Output, and whatever gives samples (the sampler, a log that
is replayed, a test) can be the source.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from legroom.model import Moment, Sample
from legroom.monitor.alarms import AlarmTracker
from legroom.monitor.sample_history import History
from legroom.words import say

_MOST_WAITING = 256  # moments that wait for a slow output
_LAST_WAIT = 2.0  # seconds for what is not yet written, once the watch was told to stop


class Output(Protocol):
    """Something that shows or keeps moments. The next sample waits for it: what may block goes into InBackground."""

    def show(self, moment: Moment) -> None: ...

    def close(self) -> None: ...


class MomentStream:
    """Moments, from any source of samples; ``history`` is what has been seen so far."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples
        self._watchman = AlarmTracker()

    @property
    def history(self) -> History:
        """Everything seen so far, in bounded memory."""
        return self._watchman.history

    def __iter__(self) -> Iterator[Moment]:
        for sample in self._samples:
            self._watchman.history.add(sample)
            yield self._watchman.judge()


def sample_periodically(
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


class BackgroundOutput:
    """An output whose writes may block (a pipe that is not read, a hung disk), shown from a thread of its own.

    Up to ``_MOST_WAITING`` moments wait; further ones are left out and counted, and the other outputs go on. What the
    output raises is raised again by the next ``show`` or by ``close``. ``close`` waits for what is still to be
    written; once ``stop`` is set it gives that two seconds, so that a signal always ends the watch.
    """

    def __init__(self, output: Output, stop: threading.Event, tell: Callable[[str], object]) -> None:
        self._output, self._stop, self._tell = output, stop, tell
        self._waiting: queue.Queue[Moment | None] = queue.Queue(_MOST_WAITING)
        self._trouble: BaseException | None = None
        self._left_out = 0
        self._thread = threading.Thread(target=self._work, name="legroom-output", daemon=True)
        self._thread.start()

    def show(self, moment: Moment) -> None:
        self._raise()
        try:
            self._waiting.put_nowait(moment)
        except queue.Full:
            self._left_out += 1
            return
        if self._left_out:
            self._tell(
                say(
                    "{count} samples were left out: the output was not read fast enough", count=self._left_out
                )
            )
            self._left_out = 0

    def close(self) -> None:
        deadline: float | None = None
        told = False
        while self._thread.is_alive():
            if not told:
                try:
                    self._waiting.put_nowait(None)
                    told = True
                except queue.Full:
                    pass
            if self._stop.is_set():
                now = time.monotonic()
                deadline = now + _LAST_WAIT if deadline is None else deadline
                if now >= deadline:
                    return  # the thread is a daemon's: it ends with the process
            self._thread.join(0.05)
        self._raise()

    def _work(self) -> None:
        try:
            try:
                while (moment := self._waiting.get()) is not None:
                    self._output.show(moment)
            finally:
                self._output.close()
        except BaseException as problem:
            self._trouble = problem

    def _raise(self) -> None:
        if self._trouble is not None:
            trouble, self._trouble = self._trouble, None
            raise trouble


def feed_outputs(stream: Iterable[Moment], outputs: Sequence[Output]) -> Moment | None:
    """Hand every moment to every output, and close them at the end whatever ends it; the last moment."""
    last = None
    with ExitStack() as closing:
        for output in outputs:
            closing.callback(output.close)
        for last in stream:
            for output in outputs:
                output.show(last)
    return last


class StopEvent(threading.Event):
    """An event that a signal handler may set; it is never cleared."""

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._shut = _thread.allocate_lock()
        self._shut.acquire()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        self._done = True
        self._open()

    def wait(self, timeout: float | None = None) -> bool:
        # Not a queue.SimpleQueue: one that a signal interrupted at the end of its timeout was seen to wait for ever.
        if not self._done and self._shut.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._open()  # for whoever else waits
        return self._done

    def _open(self) -> None:
        try:
            self._shut.release()
        except RuntimeError:  # it is open: it was set before, or a handler came between
            pass
