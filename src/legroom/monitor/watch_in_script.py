"""`legroom.watch`: watch this process from inside a script, in a thread.

Errors of the watch never reach the training run. They are reported once, as a warning, and the watch ends.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import TracebackType

from legroom.errors import CannotListen, UsageError
from legroom.messages import say
from legroom.monitor.history_and_trend import History
from legroom.monitor.http_server import parse_address
from legroom.monitor.notify import Notifier, Send, command_sender, function_sender, webhook_sender
from legroom.monitor.process_selection import this_process
from legroom.monitor.prometheus import PORT, Prometheus
from legroom.monitor.script_marks_and_steps import AnnotationCollector, AnnotationFile, StepRate
from legroom.monitor.take_watch_sample import Sampler
from legroom.monitor.watch_log import WatchLog
from legroom.monitor.watch_loop import MomentStream, Output, sample_periodically
from legroom.probe.host_files_and_syscalls import Host
from legroom.records.finding_and_alarm import Alarm
from legroom.records.watch_sample import Annotations, Moment
from legroom.system.argument_checks import check_arguments
from legroom.system.processes_and_threads import room_for_threads, start_daemon_thread, why_no_thread
from legroom.units import parse_duration

SHORTEST_INTERVAL = 0.1  # seconds
_LAST_WAIT = 10.0  # seconds for the sample being taken


def watch(
    log: str | os.PathLike[str] | None = None,
    *,
    interval: float | str = 1.0,
    on_alarm: Callable[[Alarm], object] | str | None = None,
    webhook: str | None = None,
    prometheus: str | int | None = None,
    outputs: tuple[Output, ...] = (),
) -> Watch:
    """Watch this process and its children in a thread while the ``with`` block runs.

    Errors of the watch never reach the training run.

    Args:
        log: File to append samples to, for ``legroom watch --replay``.
        interval: Time between samples: seconds, or ``"5s"``.
        on_alarm: Function called with each Alarm that begins, in a thread of the watch; or a shell command.
        webhook: URL to which alarms are posted as JSON.
        prometheus: Port, or HOST:PORT, to serve metrics on.
        outputs: Your own outputs; each one gets every moment.
    """
    check_arguments(watch, locals(), ("interval",))
    return Watch(log, interval, on_alarm, webhook, prometheus, outputs)


def checked_interval(interval: float | str) -> float:
    """The interval in seconds; UsageError where it is too short."""
    seconds = parse_duration(interval)
    if seconds < SHORTEST_INTERVAL:
        raise UsageError(
            say("the interval must be at least {least} s (got {asked} s)", least=SHORTEST_INTERVAL, asked=seconds),
            why=say("swap rates over a shorter time are mostly noise"),
            fix=(say("use 1s, or {least}s at least", least=SHORTEST_INTERVAL),),
        )
    return seconds


class Watch:
    """A running watch of this process. Methods can be called from any thread and take one or two microseconds."""

    def __init__(
        self,
        log: str | os.PathLike[str] | None,
        interval: float | str,
        on_alarm: Callable[[Alarm], object] | str | None,
        webhook: str | None,
        prometheus: str | int | None,
        outputs: tuple[Output, ...],
    ) -> None:
        self._log, self._prometheus = log, None if prometheus is None else str(prometheus)
        if self._prometheus is not None:
            parse_address(self._prometheus, PORT)
        self._interval = checked_interval(interval)
        self._senders: list[Send] = []
        if isinstance(on_alarm, str):
            self._senders.append(command_sender(on_alarm))
        elif on_alarm is not None:
            self._senders.append(function_sender(on_alarm))
        if webhook is not None:
            self._senders.append(webhook_sender(webhook))
        self._outputs: list[Output] = list(outputs)
        self._annotations, self._step_rate = AnnotationCollector(), StepRate()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._moments: MomentStream | None = None
        self._pid = os.getpid()
        self.latest: Moment | None = None

    def mark(self, text: str) -> None:
        """Name the phase that begins now: ``w.mark("epoch 3")``."""
        self._annotations.mark(text)

    def component(self, **sizes: int | None) -> None:
        """Set host memory by component, in bytes: ``w.component(model=…, optimizer=…, data=…, prefetch=…)``."""
        self._annotations.component(**sizes)

    def step(self, count: int = 1) -> None:
        """Count a training step, or several."""
        self._annotations.step(count)

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """The alarms that are active now."""
        return self.latest.alarms if self.latest else ()

    @property
    def history(self) -> History:
        """The samples so far; empty before the first one."""
        return self._moments.history if self._moments else History()

    def __enter__(self) -> Watch:
        if self._thread is not None:
            raise UsageError(
                say("this watch was already started"), fix=(say("create a new one: with legroom.watch(): …"),)
            )
        threads = 1 + len(self._senders) + (self._prometheus is not None)
        if not room_for_threads(threads):
            self._report(say("this process is not watched: {why}", why=why_no_thread(threads)))
            return self
        host = Host()
        if self._log is not None:
            self._outputs.append(WatchLog(self._log, self._report))
        if self._prometheus is not None:
            try:
                self._outputs.append(Prometheus(self._prometheus))
            except CannotListen as problem:  # as in all ranks but one of a machine
                self._report(say("no metrics are served: {what} ({why})", what=problem.what, why=problem.why))
        self._outputs += [Notifier(send, self._report) for send in self._senders]
        file = AnnotationFile(host)

        def annotations(clock: float, _pids: list[int]) -> Annotations:
            found = self._annotations.collect()
            file.write(found)
            return replace(found, steps_per_second=self._step_rate.at(clock, found.steps))

        sampler = Sampler(this_process(host), host=host, interval=self._interval, annotations=annotations)
        self._moments = MomentStream(sample_periodically(sampler.take, self._interval, self._stop))
        work = partial(self._work, self._moments, sampler, file)
        self._thread = start_daemon_thread(work, "legroom-watch")
        if self._thread is None:
            self._report(say("this process is not watched: {why}", why=why_no_thread()))
            self._close(sampler, file)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid or self._thread is None:
            return  # a forked child has no such thread and must not close the parent's files
        self._stop.set()
        self._thread.join(_LAST_WAIT)

    def _work(self, moments: MomentStream, sampler: Sampler, file: AnnotationFile) -> None:
        try:
            for moment in moments:
                self.latest = moment
                for output in self._outputs:
                    output.show(moment)
        except Exception as problem:
            self._report(say("the watch ended early: {kind}: {problem}", kind=type(problem).__name__, problem=problem))
        finally:
            self._close(sampler, file)

    def _close(self, sampler: Sampler, file: AnnotationFile) -> None:
        for close in (sampler.close, file.close, *(output.close for output in self._outputs)):
            try:
                close()
            except Exception as problem:
                self._report(say("error while ending the watch: {problem}", problem=problem))

    def _report(self, text: str) -> None:
        warnings.warn(f"legroom.watch: {text}", RuntimeWarning, stacklevel=2)
