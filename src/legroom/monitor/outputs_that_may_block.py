"""An output that may block, such as a pipe that no process reads, does not delay the samples: it has its own thread."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable

from legroom.messages import say
from legroom.monitor.watch_loop import Output
from legroom.records.watch_sample import Moment
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

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
        if self._dropped:
            self._report(say("{count} readings dropped: the output is not read fast enough", count=self._dropped))
            self._dropped = 0

    def close(self) -> None:
        if self._thread is None:
            self._output.close()
            return
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

    def _raise(self) -> None:
        if self._error is not None:
            error, self._error = self._error, None
            raise error
