"""The loop of a watch: take samples at the interval, evaluate alarms, pass each moment to every output.

Samples come from the sampler, a replayed log or a test. Anything that shows or stores a watch is an Output.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from legroom.monitor.alarms import AlarmTracker
from legroom.monitor.history_and_trend import History
from legroom.records.watch_sample import Moment, Sample


class Output(Protocol):
    """Shows or stores moments. The next sample waits for ``show``; wrap one that may block in BackgroundOutput."""

    def show(self, moment: Moment) -> None: ...

    def close(self) -> None: ...


class MomentStream:
    """Samples with the alarms that they raise; ``history`` holds the samples so far, in bounded memory."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples = samples
        self._alarms = AlarmTracker()

    @property
    def history(self) -> History:
        return self._alarms.history

    def __iter__(self) -> Iterator[Moment]:
        return map(self._alarms.add, self._samples)


def sample_periodically(
    take: Callable[[], Sample | None],
    interval: float,
    stop: threading.Event,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Sample]:
    """Take a sample at every interval until ``take`` returns None or ``stop`` is set. Skip missed intervals."""
    due = clock()
    while not stop.is_set():
        sample = take()
        if sample is None:
            return
        yield sample
        now = clock()
        due += interval
        if due < now:  # too slow, or the machine slept
            due = now + interval - (now - due) % interval
        stop.wait(due - now)


def feed_outputs(moments: Iterable[Moment], outputs: Sequence[Output]) -> Moment | None:
    """Show every moment to every output; close the outputs at the end, also after an error. Returns the last moment."""
    last = None
    with ExitStack() as closing:
        for output in outputs:
            closing.callback(output.close)
        for last in moments:
            for output in outputs:
                output.show(last)
    return last


class StopEvent(threading.Event):
    """An event that a signal handler may set; it is never cleared.

    ``threading.Event.set`` takes the lock that ``wait`` holds. A signal handler runs in the main thread between any two
    instructions, so setting an event for which its own thread is about to wait can deadlock: measured, one Ctrl-C in
    twelve right after a line was written. A bare lock may be released at any point.
    """

    def __init__(self) -> None:
        super().__init__()
        self._done = False
        self._locked = _thread.allocate_lock()
        self._locked.acquire()

    def is_set(self) -> bool:
        return self._done

    def set(self) -> None:
        self._done = True
        self._unlock()

    def wait(self, timeout: float | None = None) -> bool:
        # Not a queue.SimpleQueue: interrupted by a signal at the end of its timeout, one was seen to wait for ever.
        if not self._done and self._locked.acquire(timeout=-1 if timeout is None else max(0.0, timeout)):
            self._unlock()  # for other waiting threads
        return self._done

    def _unlock(self) -> None:
        try:
            self._locked.release()
        except RuntimeError:  # released already: set before, or by a handler in between
            pass
