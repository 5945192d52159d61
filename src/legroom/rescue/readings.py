"""The pools of one job, looked at lightly while it lives.

Covers: a slow look every second or two (RAM, swap, descriptors, cards, pressure) and a fast one at the OOM counter
and /dev/shm, which fills in the time a loader takes for a batch; a bounded history of both. Does not cover: watching
for people (monitor).

This is the only place where a supervised run samples the pools; what alarms need besides is in
alarm_watch.py. A fast look is a few system calls. The history keeps every reading of the last minute and thins
what is older, so that a run of days ends with a few thousand.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from legroom.model.death import Level, Reading
from legroom.probe.host import Host
from legroom.probe.memory import parse_pressure
from legroom.rescue.cgroup_home import Home
from legroom.rescue.oom_victims import OomVictims
from legroom.rescue.ram_level import RamLevel

# Seconds between looks at /dev/shm, by the run's age: a loader fills it in its first seconds or keeps it as it is.
PAUSES = ((5.0, 0.02), (30.0, 0.05), (float("inf"), 0.1))
SLOW = ((60.0, 1.0), (float("inf"), 2.0))  # between looks at everything else, likewise
_GPU_EVERY = 5.0
_MOST = 4000
_SHM = "/dev/shm"
_PRESSURE = "/proc/pressure/memory"
_PAGE = 4096
_MOST_PROCESSES = 64  # whose descriptors are counted


@dataclass(frozen=True, slots=True)
class Cards:
    """The cards' levels by pool, and what each process holds on them."""

    levels: Mapping[str, Level] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass
class Readings:
    """What was seen of one attempt."""

    host: Host
    home: Home
    pids: Callable[[], list[int]]  # the job's processes
    written: Callable[[], int] = int  # bytes that the job has written
    clock: Callable[[], float] = time.monotonic
    look_at_cards: Callable[[], Cards] | None = None
    history: list[Reading] = field(default_factory=list)
    peaks: dict[str, Level] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)  # the job's processes at the last slow look
    nearest: int | None = None  # the one of them whose descriptors are "fds"
    cards: Cards = field(default_factory=Cards)
    victims: OomVictims = field(init=False)
    _ram: RamLevel = field(init=False)
    _began: float = 0.0
    _slow_at: float = 0.0
    _gpu_at: float = 0.0
    _refaults: int | None = None
    _held: int = 0  # the group's peak before the start: attempts share one group
    _kept_shm: Level | None = None

    def __post_init__(self) -> None:
        self._ram = RamLevel(self.host)
        self.victims = OomVictims(self.host, self.home)

    def begin(self) -> None:
        """Take the counters before the job starts."""
        self._began = self.clock()
        self._slow_at = self._gpu_at = float("-inf")
        self.victims.begin()
        self._refaults = self.home.swapped_back(self.host)
        self._held = self.home.peak(self.host) or 0

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._began

    @property
    def pause(self) -> float:
        """How long to wait before the next look."""
        return _by_age(PAUSES, self.age)

    @property
    def slow_pause(self) -> float:
        """Seconds between slow looks."""
        return _by_age(SLOW, self.age)

    def look(self) -> Reading | None:
        """The fast look, and the slow one when it is time for it, which is given back."""
        self.victims.look(self.age, self.written())
        shm = self.shm()
        if shm is not None:
            self._peak("shm", shm)
        if self.clock() - self._slow_at >= self.slow_pause:
            self._slow_at = self.clock()
            reading = self._slow(shm)
            self._keep(reading)
            return reading
        if shm is not None and self._jumped(shm):
            self._keep(Reading(self.age, {"shm": shm}))
        return None

    def last(self) -> Level | None:
        """The look at the moment of death: /dev/shm as it is, and the counters."""
        self.victims.look(self.age, self.written())
        shm = self.shm()
        if shm is not None:
            self._peak("shm", shm)
        levels = {} if shm is None else {"shm": shm}
        self._keep(Reading(self.age, levels, self._swapped_back(), self.kills(), self._stalled()))
        return shm

    def shm(self) -> Level | None:
        """/dev/shm now."""
        room = self.host.disk_space(_SHM)
        return None if room is None or not room.size else Level(room.used, room.size)

    def kills(self) -> int | None:
        """OOM kills since the start, by the last look."""
        return self.victims.kills

    def ram_peak(self) -> Level | None:
        """RAM at its fullest by the kernel's own count; None where that says no more than was seen.

        It keeps one of a group, not of an attempt: only what this one raised it to is its own. A look a
        second misses what takes a tenth of one: memory that is taken at once, and the kill for it.
        """
        peak, seen = self.home.peak(self.host), self.peaks.get("ram")
        if peak is None or seen is None or peak <= max(self._held, seen.used):
            return None
        return Level(peak, seen.size)

    def _slow(self, shm: Level | None) -> Reading:
        levels: dict[str, Level] = {} if shm is None else {"shm": shm}
        pids = self.present = self.pids()
        self.victims.measure(pids)
        if (ram := self._ram.read(str(pids[0]) if pids else "self")) is not None:
            levels["ram"] = ram
        if (swap := self._swap()) is not None:
            levels["swap"] = swap
        if (fds := self._descriptors(pids)) is not None:
            levels["fds"] = fds
        if self.look_at_cards is not None and self.clock() - self._gpu_at >= _GPU_EVERY:
            self._gpu_at, self.cards = self.clock(), self.look_at_cards()
        levels.update(self.cards.levels)
        for name, level in levels.items():
            self._peak(name, level)
        return Reading(self.age, levels, self._swapped_back(), self.kills(), self._stalled())

    def _swapped_back(self) -> int | None:
        now = self.home.swapped_back(self.host)
        return None if now is None or self._refaults is None else max(0, now - self._refaults) * _PAGE

    def _stalled(self) -> float | None:
        """PSI of the job's own group where it has one (v2), else of the machine."""
        own = (
            f"{self.home.path}/memory.pressure" if self.home.own and self.home.version == "v2" else _PRESSURE
        )
        full = parse_pressure(self.host.text(own) or "").get("full")
        return None if full is None else full[0]

    def _swap(self) -> Level | None:
        info = self.host.table("/proc/meminfo")
        total, free = info.get("SwapTotal"), info.get("SwapFree")
        return Level(total - free, total) if total and free is not None else None

    def _descriptors(self, pids: list[int]) -> Level | None:
        """Of the process nearest its own limit."""
        from legroom.probe.process import parse_limits

        found = {}
        for pid in pids[:_MOST_PROCESSES]:
            names = self.host.names(f"/proc/{pid}/fd")
            limit = parse_limits(self.host.text(f"/proc/{pid}/limits") or "").get("Max open files")
            if names and limit:
                found[pid] = Level(len(names), limit)
        self.nearest = max(found, key=lambda pid: found[pid].share, default=None)
        return None if self.nearest is None else found[self.nearest]

    def _peak(self, name: str, level: Level) -> None:
        old = self.peaks.get(name)
        if old is None or level.share >= old.share:
            self.peaks[name] = level

    def _jumped(self, shm: Level) -> bool:
        """Whether /dev/shm moved enough since the last kept reading to show in a plot."""
        return self._kept_shm is None or abs(shm.used - self._kept_shm.used) * 20 > shm.size

    def _keep(self, reading: Reading) -> None:
        self._kept_shm = reading.levels.get("shm", self._kept_shm)
        self.history.append(reading)
        if len(self.history) > _MOST:
            half = len(self.history) // 2
            self.history = self.history[:half:2] + self.history[half:]


def _by_age(steps: tuple[tuple[float, float], ...], age: float) -> float:
    return next(pause for until, pause in steps if age < until)


def recent_rate(history: list[Reading], seconds: float = 10.0) -> float | None:
    """Bytes a second fetched back from swap over the last seconds."""
    known = [reading for reading in history if reading.swapped_back is not None]
    if len(known) < 2:
        return None
    end = known[-1]
    start = next((one for one in known if one.when >= end.when - seconds), known[0])
    if end.when - start.when < 0.5:
        return None
    return ((end.swapped_back or 0) - (start.swapped_back or 0)) / (end.when - start.when)


def worst_stall(history: list[Reading], seconds: float = 15.0) -> float | None:
    """The worst PSI average of the last seconds."""
    if not history:
        return None
    since = history[-1].when - seconds
    return max(
        (one.stalled for one in history if one.stalled is not None and one.when >= since), default=None
    )


def since_look(history: list[Reading], pool: str) -> float | None:
    """Seconds from the last look at a pool to the end; None where it was never looked at."""
    looks = [one.when for one in history if pool in one.levels]
    return history[-1].when - looks[-1] if looks else None


def thinned(history: list[Reading], most: int = 600) -> tuple[Reading, ...]:
    """At most that many readings, the last minute's whole."""
    if len(history) <= most:
        return tuple(history)
    step = len(history) // most + 1
    return (*history[:-60:step], *history[-60:])
