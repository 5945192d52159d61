"""A box in a time series, and what the series says about the future.

Covers: one light look at the pools and at the watched processes, what a script says about itself, alarms.
Does not cover: taking samples, judging them (monitor), or the whole of a box (box.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from legroom.records.machine import MemoryEvents, Pool, Pressure

AlarmLevel = Literal["warning", "critical"]


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """What one watched process holds. PSS and descriptors are read sparingly: ``pss_at`` is the sample clock then."""

    pid: int
    parent: int
    command: str
    rss: int | None = None
    rss_shmem: int | None = None
    swap: int | None = None
    pss: int | None = None
    pss_at: float | None = None
    fds: int | None = None
    fd_limit: int | None = None
    gpu: int | None = None
    born: float | None = None  # the sample clock at which it was first seen; None: at the watch's beginning

    @property
    def host(self) -> int | None:
        """Its memory on the host, in RAM or swapped out; what it shares counts whole."""
        return None if self.rss is None else self.rss + (self.swap or 0)


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One dataset of the shared cache, as far as watching needs it."""

    key: str
    source: str
    backing: str
    bytes: int
    in_use: bool | None


@dataclass(frozen=True, slots=True)
class Mark:
    """A name that a script gave to what begins now: ``epoch 3``."""

    when: float
    text: str


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a training script reports: bytes by component, its phase, its steps."""

    components: Mapping[str, int] = field(default_factory=dict)
    phase: str | None = None
    marks: tuple[Mark, ...] = ()  # new since the last sample
    steps: int | None = None  # in total; None: not counted
    steps_per_second: float | None = None  # None: not counted, or only one sample so far


@dataclass(frozen=True, slots=True)
class Sample:
    """A light Box in a time series."""

    when: float  # seconds of the day's clock
    clock: float  # seconds since the watch began, never turned back
    interval: float  # asked for between samples; what counts as long is counted in these
    watched: str  # in words
    pools: tuple[Pool, ...]
    processes: tuple[ProcessRow, ...]
    swap_in: float | None  # bytes a second, of the machine
    swap_out: float | None
    pressure: tuple[Pressure, ...]
    events: MemoryEvents
    said: Annotations = Annotations()
    entries: tuple[EntryRow, ...] | None = None  # None: not looked at
    gpu_at: float | None = None  # the sample clock at which the cards were asked; None: never
    cost: float | None = None  # seconds of CPU that taking it took
    notes: tuple[str, ...] = ()

    def pool(self, name: str) -> Pool | None:
        """The pool of that name, or None where this box has none such."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True, slots=True)
class Alarm:
    """Something that goes wrong or soon will: which pool, how bad, since when, by whom, on what numbers."""

    code: str
    pool: str | None  # None: the whole machine or cgroup
    level: AlarmLevel
    message: str
    since: float  # Sample.when of the sample that raised it
    evidence: Mapping[str, int | float | str] = field(default_factory=dict)
    pids: tuple[int, ...] = ()  # those that grow, most first

    @property
    def key(self) -> tuple[str, str | None]:
        """What makes two alarms the same one at two moments."""
        return self.code, self.pool


@dataclass(frozen=True, slots=True)
class AlarmSpan:
    """An alarm from its beginning to its end; ``until`` is None while it is active."""

    code: str
    pool: str | None
    level: AlarmLevel
    message: str
    since: float
    until: float | None = None


class PoolPoint(NamedTuple):
    """A pool at one moment; None is unknown."""

    when: float
    used: int | None
    size: int | None

    @property
    def share(self) -> float | None:
        """Used as a share of the size, where both are known and the size is not 0."""
        return None if self.used is None or not self.size else self.used / self.size


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a watch: the sample, every alarm that stands, and which of them began or ended with it."""

    sample: Sample
    alarms: tuple[Alarm, ...] = ()
    begun: tuple[Alarm, ...] = ()
    ended: tuple[Alarm, ...] = ()
