"""The loop of a watch: take samples at the interval, evaluate alarms, pass each moment to every output.

Samples come from the sampler, a replayed log or a test. Anything that shows or stores a watch is an Output. One that
may block, such as a pipe that no process reads, has its own thread and does not delay the samples.
"""

from __future__ import annotations

import _thread
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Protocol

from legroom.messages import say
from legroom.monitor.alarms import AlarmTracker
from legroom.monitor.history_and_trend import History
from legroom.records.watch_sample import Moment, Sample
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread


class Output(Protocol):
    """Shows or stores moments. The next sample waits for ``show``; wrap one that may block in BackgroundOutput."""

    def show(self, moment: Moment) -> None: ...

    def close(self) -> None: ...


class MomentStream:
    """Samples with the alarms that they raise; ``history`` holds the samples so far, in bounded memory."""

    def __init__(self, samples: Iterable[Sample]) -> None:
        self._samples, self._alarms = samples, AlarmTracker()
        self.history: History = self._alarms.history

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


_MOST_WAITING = 256  # moments queued for a slow output
_LAST_WAIT = 2.0  # seconds for unwritten output once the watch is stopped


class BackgroundOutput:
    """Runs an output whose writes may block (a pipe without a reader, a hung disk) in its own thread.

    Moments beyond ``_MOST_WAITING`` are dropped and counted. An exception of the output is raised by the next ``show``
    or by ``close``. ``close`` waits for what is queued; once ``stop`` is set it waits two seconds, so that a signal
    always ends the watch. Where no thread can be started, ``show`` writes by itself.
    """

    def __init__(self, output: Output, stop: threading.Event, report: Callable[[str], object]) -> None:
        self._output, self._stop, self._report = output, stop, report
        self._queue: queue.Queue[Moment | None] = queue.Queue(_MOST_WAITING)
        self._error: BaseException | None = None
        self._dropped = 0
        self._thread = start_daemon_thread(self._work, "legroom-output")
        if self._thread is None:
            report(say("a slow output delays the readings: {why}", why=why_no_thread()))

    def show(self, moment: Moment) -> None:
        if self._thread is None:
            self._output.show(moment)
            return
        self._raise()
        try:
            self._queue.put_nowait(moment)
        except queue.Full:
            self._dropped += 1
            return
        self._report_dropped()

    def close(self) -> None:
        if self._thread is None:
            self._output.close()
            return
        self._report_dropped()
        deadline: float | None = None
        end_queued = False
        while self._thread.is_alive():
            if not end_queued:
                try:
                    self._queue.put_nowait(None)
                    end_queued = True
                except queue.Full:
                    pass
            if self._stop.is_set():
                now = time.monotonic()
                deadline = now + _LAST_WAIT if deadline is None else deadline
                if now >= deadline:
                    return  # a daemon thread ends with the process
            self._thread.join(0.05)
        self._raise()

    def _work(self) -> None:
        try:
            try:
                while (moment := self._queue.get()) is not None:
                    self._output.show(moment)
            finally:
                self._output.close()
        except BaseException as error:
            self._error = error

    def _report_dropped(self) -> None:
        if self._dropped:
            self._report(say("{count} readings dropped: the output is not read fast enough", count=self._dropped))
            self._dropped = 0

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
