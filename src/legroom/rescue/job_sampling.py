"""Sample the memory pools of a running job: /dev/shm, RAM, swap, descriptors, GPUs, disks; raise alarms.

The OOM counter and /dev/shm are read up to 50 times a second, because a loader fills /dev/shm within one batch. The
other pools are read every second or two. The history keeps each reading of the last minute and thins older ones, so a
run of days ends with a few thousand.

Alarms follow the rules of `legroom watch`. Its own sampler lists every process of the machine; here the job's processes
are known, and a sample takes 0.6 ms instead of 4.3 (one process among eighty).
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from legroom.model import Alarm, CgroupLevel, MemoryEvents, Pool, ProcessRow, Sample
from legroom.model.death import Level, Reading
from legroom.monitor.alarms import AlarmTracker
from legroom.probe.cgroup import Version
from legroom.probe.host import Host
from legroom.probe.memory import SwapCounters, level_at, memory, parse_pressure, pressure, read_swap_counters
from legroom.probe.process import process_at
from legroom.rescue.job_cgroup import JobCgroup
from legroom.rescue.oom_victims import OomVictims

# Seconds between looks at /dev/shm, by the run's age: a loader fills it in its first seconds or keeps it as it is.
PAUSES = ((5.0, 0.02), (30.0, 0.05), (float("inf"), 0.1))

SLOW = ((60.0, 1.0), (float("inf"), 2.0))  # between looks at everything else, likewise

_GPU_EVERY = 5.0

_MOST = 4000

_SHM = "/dev/shm"

_PRESSURE = "/proc/pressure/memory"

_PAGE = 4096

_MOST_PROCESSES = 64  # whose descriptors are counted


_FIND_LIMIT_EVERY = (
    30  # looks after which all levels are read again: limits may be changed under a living job
)


_EVERY = 1.0

_MAPS_EVERY = 10.0  # a torch process maps a thousand files: listing them takes a millisecond

_MOST_CWDS = 8

_WRITABLE = re.compile(r"^\S+ rw.s \S+ \S+ \d+ +(/(?!dev/|memfd:|SYSV).*)$", re.M)

_DELETED = " (deleted)"


_MOST_KEPT = 100

_LONGEST_COMMAND = 160


@dataclass(frozen=True, slots=True)
class GpuLevels:
    """The cards' levels by pool, and what each process holds on them."""

    levels: Mapping[str, Level] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass
class JobSampler:
    """What was seen of one attempt."""

    host: Host
    home: JobCgroup
    pids: Callable[[], list[int]]  # the job's processes
    written: Callable[[], int] = int  # bytes that the job has written
    clock: Callable[[], float] = time.monotonic
    look_at_cards: Callable[[], GpuLevels] | None = None
    history: list[Reading] = field(default_factory=list)
    peaks: dict[str, Level] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)  # the job's processes at the last slow look
    nearest: int | None = None  # the one of them whose descriptors are "fds"
    cards: GpuLevels = field(default_factory=GpuLevels)
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


def seconds_unread(history: list[Reading], pool: str) -> float | None:
    """Seconds from the last look at a pool to the end; None where it was never looked at."""
    looks = [one.when for one in history if pool in one.levels]
    return history[-1].when - looks[-1] if looks else None


def thinned(history: list[Reading], most: int = 600) -> tuple[Reading, ...]:
    """At most that many readings, the last minute's whole."""
    if len(history) <= most:
        return tuple(history)
    step = len(history) // most + 1
    return (*history[:-60:step], *history[-60:])


@dataclass
class RamLevel:
    """The tightest of the limits above a process, or the machine's RAM where none is tighter."""

    host: Host
    _tightest: str | None = None  # the group that has it
    _version: Version | None = None
    _looks: int = 0

    def read(self, pid: str) -> Level | None:
        """How full it is now; None where it cannot be read."""
        if self._looks % _FIND_LIMIT_EVERY == 0:
            self._look_around(pid)
        self._looks += 1
        if self._tightest is not None and self._version is not None:
            level = level_at(self.host, self._version, self._tightest)
            if level.limit is not None and level.unreclaimable is not None:
                return Level(level.unreclaimable, level.limit)
        info = self.host.table("/proc/meminfo")
        total, available = info.get("MemTotal"), info.get("MemAvailable")
        return None if total is None or available is None else Level(max(0, total - available), total)

    def _look_around(self, pid: str) -> None:
        found = memory(self.host, pid)
        limited = [level for level in found.levels if _limits(level, found.total)]
        tight = min(limited, key=lambda level: level.limit or 0, default=None)
        self._tightest = None if tight is None else tight.path
        self._version = found.cgroup


def _limits(level: CgroupLevel, total: int | None) -> bool:
    return level.limit is not None and (total is None or level.limit < total)


@dataclass
class DiskLevels:
    """The disks of one attempt."""

    host: Host
    folders: Iterable[str]
    pids: Callable[[], list[int]] = list  # the job's processes
    _peaks: dict[int, tuple[str, Level]] = field(default_factory=dict)  # by device
    _mapped: tuple[str, ...] = ()
    _maps_at: float = float("-inf")
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Read them from now on."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, within: float = 1.0) -> dict[str, Level]:
        """Each disk at its fullest, by directory, the present level included if it comes within that time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within)
        return dict(list(self._peaks.values()))

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._read()
        self._read()

    def _read(self) -> None:
        pids = self.pids()[:_MOST_CWDS]
        if time.monotonic() - self._maps_at >= _MAPS_EVERY:
            self._maps_at = time.monotonic()
            self._mapped = tuple(
                dict.fromkeys(folder for pid in pids for folder in mapped_folders(self.host, pid))
            )
        places = (self.host.link(f"/proc/{pid}/cwd") for pid in pids)
        for folder in dict.fromkeys((*self.folders, *(place for place in places if place), *self._mapped)):
            room = self.host.disk_space(folder)
            if room is None or not room.size:
                continue
            try:
                device = os.stat(self.host.path(folder)).st_dev
            except OSError:
                continue
            # What root alone may write to is not room: a disk is full when nothing is free to us.
            level = Level(room.size - room.free, room.size)
            old = self._peaks.get(device)
            if old is None or level.share >= old[1].share:
                self._peaks[device] = (old[0] if old else folder, level)


def mapped_folders(host: Host, pid: int) -> list[str]:
    """Directories of the files that a process maps for writing."""
    found = []
    for match in _WRITABLE.finditer(host.text(f"/proc/{pid}/maps") or ""):
        if not match[1].endswith(_DELETED):
            found.append(os.path.dirname(match[1]))
    return found


@dataclass
class JobAlarms:
    """The alarms of one attempt."""

    readings: JobSampler
    raised: deque[Alarm] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    _alarms: AlarmTracker = field(default_factory=AlarmTracker)
    _born: dict[int, float | None] = field(default_factory=dict)
    _swap: SwapCounters | None = None

    def look(self, reading: Reading) -> tuple[Alarm, ...]:
        """Those that begin, or turn critical, with this reading; ``since`` says when, from the job's start."""
        moment = self._alarms.add(self._sample(reading))
        begun = tuple(replace(alarm, since=reading.when) for alarm in moment.begun)
        self.raised.extend(begun)
        return begun

    def _sample(self, reading: Reading) -> Sample:
        readings = self.readings
        rows = self._rows(reading)
        inward, outward = self._swap_rates()
        _, source = readings.home.counters(readings.host)
        return Sample(
            when=reading.when,
            clock=reading.when,
            interval=readings.slow_pause,
            watched="",
            # Descriptors are no bytes: the rules take them from their process.
            pools=tuple(_pool(name, level) for name, level in reading.levels.items() if name != "fds"),
            processes=rows,
            swap_in=inward,
            swap_out=outward,
            pressure=pressure(readings.host, str(rows[0].pid) if rows else "self"),
            events=MemoryEvents(reading.oom_kills, None, None, "cgroup", source),
        )

    def _rows(self, reading: Reading) -> tuple[ProcessRow, ...]:
        readings, first = self.readings, not self._born
        fds = reading.levels.get("fds")
        rows = []
        for pid in readings.present:
            found = process_at(readings.host, pid)
            if found is None:
                continue
            nearest = fds if pid == readings.nearest else None
            row = ProcessRow(
                pid,
                found.parent,
                found.command[:_LONGEST_COMMAND],
                rss=found.rss,
                rss_shmem=found.rss_shmem,
                swap=found.swap,
                fds=nearest.used if nearest else None,
                fd_limit=nearest.size if nearest else None,
                gpu=readings.cards.held.get(pid),
                born=self._born.setdefault(pid, None if first else reading.when),
            )
            rows.append(row)
        self._born = {row.pid: row.born for row in rows}
        return tuple(rows)

    def _swap_rates(self) -> tuple[float | None, float | None]:
        """Bytes a second since the last look, in and out, of the machine."""
        before, now = self._swap, read_swap_counters(self.readings.host)
        self._swap = now
        if before is None or now.when <= before.when:
            return None, None
        pairs = ((before.swapped_in, now.swapped_in), (before.swapped_out, now.swapped_out))
        inward, outward = (
            None if old is None or new is None else max(0, new - old) / (now.when - before.when)
            for old, new in pairs
        )
        return inward, outward


def _pool(name: str, level: Level) -> Pool:
    return Pool(name, level.size, level.used, max(0, level.size - level.used), "")
