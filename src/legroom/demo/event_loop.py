"""The loop behind every stage: reads the messages of the children, measures their memory, reads the pools, draws.

It has one thread. Signals are noted when they come and obeyed between two turns, so that no child is started and
then forgotten.
"""

from __future__ import annotations

import contextlib
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from legroom.demo.demo_child import Child, end_all
from legroom.errors import DemoFailed
from legroom.monitor.watch_loop import StopEvent
from legroom.probe.host import Host
from legroom.probe.memory import memory, ram_pool
from legroom.probe.shm import shm_space
from legroom.records import Pool
from legroom.words import say

WITHIN = 180.0  # seconds to wait for anything
_TURN = 0.1  # seconds
_MEASURE = 0.5  # seconds between two measurements: for each the kernel walks every page table


class Screen(Protocol):
    """Where the demo is shown: stages, events, and the state now. ``clock`` is in seconds since the start."""

    def headline(self, clock: float, title: str) -> None: ...
    def tell(self, clock: float, text: str) -> None: ...
    def draw(self, clock: float, pools: Sequence[Pool], children: Sequence[Child]) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class MemorySample:
    """The memory of a stage's children at one moment."""

    when: float  # seconds since the start
    act: str
    held: tuple[tuple[str, int], ...]  # (name, PSS)

    @property
    def total(self) -> int:
        return sum(size for _, size in self.held)


@dataclass
class EventLoop:
    """What all stages share."""

    screen: Screen
    host: Host = field(default_factory=Host)
    began: float = field(default_factory=time.monotonic)
    stage: str = ""
    children: list[Child] = field(default_factory=list)  # of this stage
    started: list[Child] = field(default_factory=list)  # of all stages
    samples: list[MemorySample] = field(default_factory=list)
    marks: list[tuple[float, str]] = field(default_factory=list)
    _pools: tuple[Pool, ...] = ()
    _stop: StopEvent = field(default_factory=StopEvent)
    _signal: int = 0
    _measured: float = 0.0

    @property
    def clock(self) -> float:
        """Seconds since the start."""
        return time.monotonic() - self.began

    def begin(self, stage: str, title: str) -> None:
        """Begin the next stage."""
        self.stage, self.children = stage, []
        self.screen.headline(self.clock, title)

    def tell(self, text: str, mark: str | None = None) -> None:
        """Report an event; ``mark`` is its label in the chart."""
        if mark is not None:
            self.marks.append((self.clock, mark))
        self.screen.tell(self.clock, text)

    def start(self, *children: Child) -> None:
        """Start children of this stage."""
        for child in children:
            self.started.append(child)
            self.children.append(child)
            child.start()

    def until(self, reached: Callable[[], object], what: str) -> None:
        """Run until that is true."""
        deadline = time.monotonic() + WITHIN
        while True:
            self._turn()
            if reached():
                return
            if time.monotonic() >= deadline:
                raise DemoFailed(
                    say("the demo timed out waiting for {what}", what=what),
                    why=say("{seconds:.0f} s passed", seconds=WITHIN),
                    fix=(say("keep the logs:\nlegroom demo --keep"),),
                )
            self._stop.wait(_TURN)

    def obey_signals(self) -> None:
        """Raise where Ctrl-C or SIGTERM came."""
        if self._signal == signal.SIGINT:
            raise KeyboardInterrupt
        if self._signal:
            raise SystemExit(128 + self._signal)

    def _turn(self) -> None:
        self.obey_signals()
        for child in self.children:
            child.read_messages()
        if time.monotonic() - self._measured >= _MEASURE:
            self._measured = time.monotonic()
            for child in self.children:
                table = {} if child.pid is None else self.host.table(f"/proc/{child.pid}/smaps_rollup")
                child.pss, child.rss = table.get("Pss"), table.get("Rss")
            held = tuple((child.name, child.pss) for child in self.children if child.pss is not None)
            self.samples.append(MemorySample(self.clock, self.stage, held))
            self._pools = (shm_pool(self.host), ram_pool(memory(self.host)))
        self.screen.draw(self.clock, self._pools, self.children)

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Signals are noted, not obeyed, so that nothing is left half made or half removed."""

        def note(number: int, _frame: object) -> None:
            self._signal = self._signal or number
            self._stop.set()

        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        before = {number: signal.signal(number, note) for number in numbers}
        try:
            yield
        finally:
            self.screen.close()
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextlib.contextmanager
    def ending_children(self) -> Iterator[None]:
        """No child is left at the end."""
        try:
            yield
        finally:
            end_all(self.started)


def shm_pool(host: Host) -> Pool:
    """/dev/shm as it is now."""
    size, used, free, reason = shm_space(host, "/dev/shm")
    return Pool("shm", size, used, free, say("statvfs({path})", path="/dev/shm"), reason)


def peak(samples: Sequence[MemorySample], act: str, count: int) -> int | None:
    """The most memory that the children of a stage held together, while all of them ran."""
    totals = [sample.total for sample in samples if sample.act == act and len(sample.held) == count]
    return max(totals, default=None)
