"""One attempt: a child from its start to its verdict.

Covers: starting it, looking at it while it lives, ending it when it is time, gathering what is known about its death.
Does not cover: what comes after it (supervisor.py), the verdict itself (classify.py).
"""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.model import Box
from legroom.model.death import Attempt, Evidence, Level, LogFacts, Verdict
from legroom.probe.host import Host
from legroom.rescue.alarm_watch import AlarmWatch
from legroom.rescue.cgroup_home import Home
from legroom.rescue.child import Child, in_foreground
from legroom.rescue.classify import classify
from legroom.rescue.evidence import Witness
from legroom.rescue.fixes import fixes
from legroom.rescue.flags import LEVERS, knobs
from legroom.rescue.log_reader import facts_of
from legroom.rescue.order import Order
from legroom.rescue.output import Output
from legroom.rescue.readings import Cards, Readings
from legroom.rescue.rules_counters import oom_lines
from legroom.rescue.stall import StallWatch, cpu_seconds, hangs_on_shm, held_shm, refused_shm
from legroom.system.child_processes import ExitStatus, signal_name
from legroom.units import format_size
from legroom.words import say

_DRAIN = 2.0  # seconds for the last output after the end
_STALL_EVERY = 2.0
_STALL_GRACE = 5.0
_PASSED_ON = ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGCONT", "SIGWINCH")
_ENDS = frozenset({"SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT"})


@dataclass
class Watched:
    """One attempt while it lives."""

    order: Order
    box: Box
    home: Home
    host: Host
    tell: Callable[[str], None]
    asked: int | None = None  # the signal that told us to stop
    stalled_on: str | None = None
    held_shm: int | None = None  # by the job, when it was last seen to do nothing
    _child: Child | None = None
    _output: Output = field(default_factory=Output)
    _deadline: float | None = None
    _typed: bool = False  # we were in the terminal's foreground when that signal came
    _had_terminal: bool = False  # the terminal was handed to the child

    def run(
        self, number: int, command: Sequence[str], environment: Mapping[str, str], *, raise_descriptors: bool
    ) -> Attempt:
        """Start it, wait for its end, say what ended it."""
        self._output = Output(stdout=self.order.stdout)
        streams = self._output.open()
        readings = Readings(self.host, self.home, list, look_at_cards=_cards(self.host))
        alarms = AlarmWatch(readings)
        witness = Witness(self.host, self.home, readings, self.order.folders)
        witness.begin()
        try:
            with self._signals():
                child = self._child = Child.start(
                    command, environment, streams, self.home, raise_descriptors=raise_descriptors
                )
                self._had_terminal = child.foreground is not None
                self._output.start()
                readings.pids = lambda: child.pids(self.host)
                readings.victims.root = child.process.pid
                readings.written = lambda: self._output.count
                ending, shm_at_end = self._wait(child, readings, alarms)
                fine = ending.success and self.stalled_on is None
                if not fine:
                    child.end_all()  # what is left of it would hold memory, ports and files of the next attempt
                self._output.finish(_DRAIN)
                child.close()
            verdict: Verdict | None = None
            notes: list[str] = []
            if not fine or readings.kills():
                verdict, evidence = self._verdict(witness, ending, shm_at_end)
                if fine and verdict.cause != "ram-oom-kill":
                    verdict, notes = None, oom_lines(evidence)  # a kill that may have been the job's
                    for line in notes:
                        self._say(line)
        except OSError:
            if self._child is None:
                self._output.abandon()
            raise
        finally:
            witness.close()
        found = knobs(command, self.order.named)
        return Attempt(
            number=number,
            command=tuple(command),
            settings={name: getattr(found, name) for name in LEVERS},
            ending=ending,
            seconds=readings.age,
            verdict=verdict,
            notes=tuple(notes),
            readings=tuple(readings.history),
            peaks=dict(readings.peaks),
            alarms=tuple(alarms.raised),
        )

    def begin_line(self) -> None:
        """What is told next begins a line, also where the job's output ended in the middle of one."""
        if not self.order.quiet:
            self._output.begin_line()

    def _say(self, line: str) -> None:
        self.begin_line()
        self.tell(line)

    def _wait(self, child: Child, readings: Readings, alarms: AlarmWatch) -> tuple[ExitStatus, Level | None]:
        stall = StallWatch(self.order.stall)
        stall_at = 0.0
        while True:
            ending = child.wait(readings.pause)
            if ending is not None:
                return ending, readings.last()
            reading = readings.look()
            if reading is not None:
                for alarm in alarms.look(reading):
                    self._say(f"{alarm.level} {alarm.code}: {alarm.message}")
            now = time.monotonic()
            if self._deadline is not None and now >= self._deadline:
                child.end_all()
                self._deadline = None
            if now >= stall_at and self.stalled_on is None and self.asked is None:
                stall_at = now + _STALL_EVERY
                cpu = cpu_seconds(self.host, child.pids(self.host))
                if stall.stalled(now, cpu, self._output.count) and self._hangs(child, readings):
                    self._end_stall(child, stall)

    def _hangs(self, child: Child, readings: Readings) -> bool:
        pids = child.pids(self.host)
        self.held_shm = held_shm(self.host, pids)
        log = facts_of(self._output.tail.bytes())
        refused = refused_shm(self.host, pids)
        return hangs_on_shm(
            readings.shm(), self.held_shm, log, loader=readings.victims.loader, refused=refused
        )

    def _end_stall(self, child: Child, stall: StallWatch) -> None:
        held = format_size(self.held_shm or 0)
        if not self.order.retries:
            stall.patience = 0.0  # said once
            self._say(
                say("it hangs on a full /dev/shm, of which it holds {held}; --retries ends and restarts it", held=held)
            )  # fmt: skip
            return
        self._say(say("it hangs on a full /dev/shm, of which it holds {held}: it is ended", held=held))
        self.stalled_on = "shm"
        child.signal(signal.SIGTERM)
        self._deadline = time.monotonic() + min(self.order.grace, _STALL_GRACE)

    def _verdict(
        self, witness: Witness, ending: ExitStatus, shm_at_end: Level | None
    ) -> tuple[Verdict, Evidence]:
        log = facts_of(self._output.tail.bytes(), self._output.tail.passed)
        evidence = witness.evidence(
            ending,
            log,
            shm_at_end,
            asked_to_stop=self.asked,
            stalled_on=self.stalled_on,
            held_shm=self.held_shm,
            keyboard=self._by_keyboard(ending, log),
        )
        return with_fixes(classify(evidence), evidence, self.box), evidence

    def _by_keyboard(self, ending: ExitStatus, log: LogFacts) -> bool:
        """Whether Ctrl-C ended it: typed to us, or to it where the terminal was its own."""
        if self.asked is not None:
            return self.asked == signal.SIGINT and self._typed
        last = log.last_error
        interrupted = last is not None and "KeyboardInterrupt" in last.line
        return self._had_terminal and (ending.signal == signal.SIGINT or interrupted)

    @contextlib.contextmanager
    def _signals(self) -> Iterator[None]:
        """Pass signals on while it lives; only a main thread may ask for them."""
        old = {}
        if threading.current_thread() is threading.main_thread():
            for name in _PASSED_ON:
                number = getattr(signal, name, None)
                if number is not None:
                    old[number] = signal.signal(number, self._pass_on)
        try:
            yield
        finally:
            for number, handler in old.items():
                signal.signal(number, handler)

    def _pass_on(self, number: int, _frame: object) -> None:
        if number == getattr(signal, "SIGWINCH", None):
            self._output.resize()
        if signal_name(number) in _ENDS:
            if self.asked is None:
                self.asked, self._typed = number, in_foreground()
            if self._deadline is None:
                self._deadline = time.monotonic() + self.order.grace
        if self._child is not None:
            self._child.signal(number)


def with_fixes(verdict: Verdict, evidence: Evidence, box: Box) -> Verdict:
    """The verdict with what to do about it on that box."""
    ram = box.pool("ram")
    lines = fixes(
        verdict.cause,
        box.place,
        ram=None if ram is None else ram.size,
        machine=box.memory.total,
        shm=evidence.peaks.get("shm"),
        nofile=box.limits.nofile_soft,
        here=box.shm.size if box.shm.mounted else None,
        keyboard=evidence.keyboard,
    )
    return replace(verdict, fix=lines)


def _cards(host: Host) -> Callable[[], Cards] | None:
    if not host.exists("/dev/nvidiactl"):
        return None

    def look() -> Cards:
        from legroom.probe.gpu_devices import gpu_pools, gpus

        found = gpus(host)
        levels = {
            pool.name: Level(pool.used, pool.size)
            for pool in gpu_pools(found)
            if pool.used is not None and pool.size
        }
        held: dict[int, int] = {}
        for card in found.cards:
            for user in card.processes or ():
                if user.used is not None and user.command is not None:  # else its pid is of another namespace
                    held[user.pid] = held.get(user.pid, 0) + user.used
        return Cards(levels, held)

    return look
