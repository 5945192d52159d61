"""The one loop behind everything: hears the children, weighs them, reads the pools, draws.

Covers: waiting for something without being deaf to Ctrl-C, the series of what was measured. Does not cover: what is
waited for (the acts), how it looks (screen.py).

It has one thread. Signals are noted when they come and obeyed between two looks, so that no child is ever started and
forgotten.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from legroom.demo.job import Job, end_all
from legroom.demo.screen import Screen, View
from legroom.errors import DemoFailed
from legroom.model import Pool
from legroom.monitor.watch_loop import StopEvent
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool
from legroom.probe.shm import shm_space
from legroom.words import say

_LOOK = 0.1  # seconds between two looks
_WEIGH = 0.5  # between two weighings: the kernel walks every page table for one


@dataclass(frozen=True, slots=True)
class Weight:
    """What everybody held at one moment."""

    when: float  # seconds since the beginning
    act: str
    held: tuple[tuple[str, int], ...]  # (name, PSS)

    @property
    def total(self) -> int:
        return sum(size for _, size in self.held)


@dataclass
class Stage:
    """What all acts share."""

    screen: Screen
    host: Host = field(default_factory=Host)
    began: float = field(default_factory=time.monotonic)
    title: str = ""
    act: str = ""
    jobs: list[Job] = field(default_factory=list)  # all that were ever started
    shown: list[Job] = field(default_factory=list)  # those of this act
    weights: list[Weight] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    pools: tuple[Pool, ...] = ()
    _stop: StopEvent = field(default_factory=StopEvent)
    _signal: int = 0
    _weighed: float = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the beginning."""
        return time.monotonic() - self.began

    def begin(self, act: str, title: str) -> None:
        """The next act."""
        self.act, self.title, self.shown = act, title, []
        self.screen.headline(self.clock, title)

    def tell(self, text: str, mark: str | None = None) -> None:
        """Something happened; ``mark`` is its name in the picture."""
        if mark is not None:
            self.marks.append((self.clock, mark))
        self.screen.tell(self.clock, text)

    def start(self, *jobs: Job) -> None:
        """Start them at once."""
        for job in jobs:
            self.jobs.append(job)
            self.shown.append(job)
            job.start()

    def until(self, reached: Callable[[], bool], within: float, what: str) -> None:
        """Look on until that is so."""
        deadline = time.monotonic() + within
        while True:
            self.look()
            if reached():
                return
            if time.monotonic() >= deadline:
                raise DemoFailed(
                    say("the demo waited for {what} and it did not come", what=what),
                    why=say("{seconds:.0f} s went by", seconds=within),
                    fix=(say("look at the logs:\nlegroom demo --keep"),),
                )
            self._stop.wait(_LOOK)

    def look(self) -> None:
        """One look at everything; raises where somebody wants us to stop."""
        self.obey()
        for job in self.shown:
            job.ear.listen()
        now = time.monotonic()
        if now - self._weighed >= _WEIGH:
            self._weighed = now
            self._weigh()
            self.pools = self._read_pools()
        self.screen.draw(View(self.clock, self.title, self.pools, tuple(self.shown)))

    def obey(self) -> None:
        """End where Ctrl-C or SIGTERM came."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            raise SystemExit(128 + self._signal)

    def _weigh(self) -> None:
        held = []
        for job in self.shown:
            pid = job.pid
            table = {} if pid is None else self.host.table(f"/proc/{pid}/smaps_rollup")
            job.pss, job.rss = table.get("Pss"), table.get("Rss")
            if job.pss is not None:
                held.append((job.name, job.pss))
        self.weights.append(Weight(self.clock, self.act, tuple(held)))

    def _read_pools(self) -> tuple[Pool, ...]:
        return shm_pool(self.host), ram_pool(memory(self.host))

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        """Signals are noted, not obeyed: what is being made is made, and what is being removed is removed."""
        before = {
            number: signal.signal(number, self._note)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        }
        try:
            yield
        finally:
            self.screen.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def playing(self) -> Iterator[None]:
        """At the end of it no child is left."""
        try:
            yield
        finally:
            end_all(self.jobs)

    def _note(self, number: int, _frame: object) -> None:
        self._signal = self._signal or number
        self._stop.set()


def shm_pool(host: Host) -> Pool:
    """/dev/shm as it is now."""
    size, used, free, reason = shm_space(host, "/dev/shm")
    return Pool("shm", size, used, free, say("statvfs({path})", path="/dev/shm"), reason)


def peak(weights: Sequence[Weight], act: str, everybody: int) -> int | None:
    """The most that all of an act's processes held together, while all of them were there."""
    totals = [weight.total for weight in weights if weight.act == act and len(weight.held) == everybody]
    return max(totals, default=None)
