"""Watching from inside a script: ``with legroom.watch(log="run.jsonl") as w: …``

Covers: a thread that samples this process and its children, marks, components and steps.
Does not cover: watching others (the command line does), the outputs themselves.

The training comes first: nothing that goes wrong in here reaches it. Trouble is told once, as a warning, and the
watch ends.
"""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType

from legroom.errors import UsageError
from legroom.model import Alarm, Moment, Said
from legroom.monitor.annotations import AnnotationFile, ScriptAnnotations, StepRate
from legroom.monitor.notify import Notifier, Send, State, command_sender, webhook_sender
from legroom.monitor.process_selection import this_process
from legroom.monitor.prometheus import Prometheus
from legroom.monitor.sample_history import History
from legroom.monitor.sampler import Sampler
from legroom.monitor.watch_log import WatchLog
from legroom.monitor.watch_loop import MomentStream, Output, sample_periodically
from legroom.probe.host import Host
from legroom.units import parse_duration
from legroom.words import say

LEAST_INTERVAL = 0.1  # seconds: below, the rates of swap say nothing
_LAST_WAIT = 10.0


def watch(
    log: str | os.PathLike[str] | None = None,
    *,
    interval: float | str = 1.0,
    on_alarm: Callable[[Alarm], object] | str | None = None,
    webhook: str | None = None,
    prometheus: str | int | None = None,
    outputs: tuple[Output, ...] = (),
) -> Watch:
    """Watch this process and its children in a thread, from ``with`` to its end.

    Nothing that goes wrong in the watch reaches the training.

    Args:
        log: A file to append samples to, for ``legroom watch --replay``.
        interval: Between two samples: seconds, or ``"5s"``.
        on_alarm: Called with each Alarm that begins, in the watch's thread; or a shell command.
        webhook: An address to which alarms are posted as JSON.
        prometheus: A port, or HOST:PORT, at which metrics are served.
        outputs: Outputs of your own, each shown every moment.
    """
    return Watch(log, interval, on_alarm, webhook, prometheus, outputs)


def checked_interval(interval: float | str) -> float:
    """The interval in seconds; UsageError where it is too short to be sampled at."""
    seconds = parse_duration(interval)
    if seconds < LEAST_INTERVAL:
        raise UsageError(
            say("an interval of {asked} s is too short", asked=seconds),
            why=say("over less than {least} s one burst of pages reads as a storm", least=LEAST_INTERVAL),
            fix=(say("ask for 1s, or for {least}s at least", least=LEAST_INTERVAL),),
        )
    return seconds


class Watch:
    """A watch of this process. Its methods may be called from any thread, and cost a microsecond or two."""

    def __init__(
        self,
        log: str | os.PathLike[str] | None,
        interval: float | str,
        on_alarm: Callable[[Alarm], object] | str | None,
        webhook: str | None,
        prometheus: str | int | None,
        outputs: tuple[Output, ...],
    ) -> None:
        self._log, self._prometheus = log, prometheus
        self._interval = checked_interval(interval)
        self._carriers: list[Send] = []
        if isinstance(on_alarm, str):
            self._carriers.append(command_sender(on_alarm))
        elif on_alarm is not None:
            self._carriers.append(_to_function(on_alarm))
        if webhook is not None:
            self._carriers.append(webhook_sender(webhook))
        self._outputs: list[Output] = list(outputs)
        self._voice, self._pace = ScriptAnnotations(), StepRate()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._stream: MomentStream | None = None
        self._pid = os.getpid()
        self.latest: Moment | None = None

    # What the script says.

    def mark(self, text: str) -> None:
        """Name what begins now: ``w.mark("epoch 3")``."""
        self._voice.mark(text)

    def component(self, **sizes: int | None) -> None:
        """Bytes on the host by component: ``w.component(model=…, optimizer=…, data=…, prefetch=…)``."""
        self._voice.component(**sizes)

    def step(self, count: int = 1) -> None:
        """Count a training step, or several."""
        self._voice.step(count)

    # What the watch says.

    @property
    def alarms(self) -> tuple[Alarm, ...]:
        """Those that stand now."""
        return self.latest.alarms if self.latest else ()

    @property
    def history(self) -> History:
        """What was seen so far; empty before the first sample."""
        return self._stream.history if self._stream else History()

    def __enter__(self) -> Watch:
        if self._thread is not None:
            raise UsageError(
                say("this watch was started already"), fix=(say("make a new one: with legroom.watch(): …"),)
            )
        host = Host()
        if self._log is not None:
            self._outputs.append(WatchLog(self._log, self._tell))
        if self._prometheus is not None:
            self._outputs.append(Prometheus(str(self._prometheus)))
        self._outputs += [Notifier(carry, self._tell) for carry in self._carriers]
        board = AnnotationFile(host)

        def said(clock: float, _pids: list[int]) -> Said:
            heard = self._voice.said()
            board.write(heard)
            return replace(heard, steps_per_second=self._pace.at(clock, heard.steps))

        sampler = Sampler(this_process(host), host=host, interval=self._interval, said=said)
        self._stream = MomentStream(sample_periodically(sampler.take, self._interval, self._stop))
        self._thread = threading.Thread(
            target=self._work, args=(self._stream, sampler, board), name="legroom-watch", daemon=True
        )
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, trace: TracebackType | None
    ) -> None:
        if os.getpid() != self._pid or self._thread is None:
            return  # a forked child has no such thread, and none of these files are its own
        self._stop.set()
        self._thread.join(_LAST_WAIT)

    def _work(self, stream: MomentStream, sampler: Sampler, board: AnnotationFile) -> None:
        try:
            for moment in stream:
                self.latest = moment
                for output in self._outputs:
                    output.show(moment)
        except Exception as trouble:
            self._tell(
                say("the watch ended early: {kind}: {trouble}", kind=type(trouble).__name__, trouble=trouble)
            )
        finally:
            for close in (sampler.close, board.close, *(output.close for output in self._outputs)):
                try:
                    close()
                except Exception as trouble:
                    self._tell(say("while ending the watch: {trouble}", trouble=trouble))

    def _tell(self, text: str) -> None:
        warnings.warn(f"legroom.watch: {text}", RuntimeWarning, stacklevel=2)


def _to_function(call: Callable[[Alarm], object]) -> Send:
    def carry(alarm: Alarm, state: State) -> None:
        if state == "begun":
            call(alarm)

    return carry
