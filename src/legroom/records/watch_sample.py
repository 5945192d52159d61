"""Samples of `legroom watch`: memory pools, watched processes, annotations of the script; active alarms over time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from legroom.records.finding_and_alarm import Alarm, AlarmLevel
from legroom.records.machine import MemoryEvents, Pool, Pressure


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """Memory of one watched process. PSS and descriptors are read less often: ``pss_at`` is the sample time."""

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
    born: float | None = None  # sample time at which it was first seen; None: at the start
    copied: int | None = None  # of a forked worker: bytes of its parent's memory that it copied by reading
    copied_at: float | None = None  # sample time of that reading
    rss_anon: int | None = None
    rss_file: int | None = None
    pss_anon: int | None = None  # rss_anon when PSS was read

    @property
    def pss_estimate(self) -> int | None:
        """PSS as read, plus what RssAnon has changed since; before it is read RSS, which it cannot exceed."""
        if self.pss is None or self.rss_anon is None or self.pss_anon is None:
            return self.rss if self.pss is None else self.pss
        estimate = max(0, self.pss + self.rss_anon - self.pss_anon)
        return estimate if self.rss is None else min(estimate, max(self.rss, self.pss))

    @property
    def host(self) -> int | None:
        """Its memory on the host, in RAM or swap; shared memory counts in full."""
        return None if self.rss is None else self.rss + (self.swap or 0)


@dataclass(frozen=True, slots=True)
class EntryRow:
    """One dataset of the shared cache."""

    key: str
    source: str
    backing: str
    bytes: int
    in_use: bool | None


@dataclass(frozen=True, slots=True)
class TrainerRow:
    """A trainer of a group that shares batches."""

    pid: int
    command: str
    state: str  # training, waiting, slow, alone
    epoch: int | None  # of the batch it needs next
    batch: int | None
    behind: int | None  # batches from there to the next that will be made; None: another epoch, or unknown
    shared: int
    made_itself: int


@dataclass(frozen=True, slots=True)
class GroupRow:
    """A group of trainers that share batches: who makes them, and how full its window is."""

    name: str
    producer: int | None  # pid; None: its only trainer makes the batches itself
    workers: int
    batches: int  # ready
    most_batches: int
    bytes: int
    error: str | None
    trainers: tuple[TrainerRow, ...]


@dataclass(frozen=True, slots=True)
class GpuCopyRow:
    """A copy of data or weights in GPU memory that processes share; it takes its bytes once."""

    gpu: str  # UUID of the GPU
    key: str
    name: str  # the source, and the array of it
    bytes: int
    users: tuple[int, ...]  # pids of the processes that have it mapped


@dataclass(frozen=True, slots=True)
class Mark:
    """A label set by the script at this time: ``epoch 3``."""

    when: float
    text: str


@dataclass(frozen=True, slots=True)
class GrowthRow:
    """A line of code that makes the memory of a process grow, as `legroom leak` reports it while the process runs."""

    pid: int
    where: str  # train.py:31
    what: str
    rate: float  # bytes per step or second
    per: str
    certainty: str


@dataclass(frozen=True, slots=True)
class ProcessSteps:
    """Training steps of one process so far, as it reports them itself or `legroom leak` counts them in it."""

    pid: int
    steps: int


@dataclass(frozen=True, slots=True)
class Annotations:
    """What a training script reports: bytes by component, its phase, its steps."""

    components: Mapping[str, int] = field(default_factory=dict)
    phase: str | None = None
    marks: tuple[Mark, ...] = ()  # new since the last sample
    steps: int | None = None  # in total; None: not reported
    steps_per_second: float | None = None  # None: not reported, or only one sample so far
    growing: tuple[GrowthRow, ...] = ()
    process_steps: tuple[ProcessSteps, ...] = ()


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of the machine."""

    when: float  # Unix time
    clock: float  # seconds since the watch began, monotonic
    interval: float  # requested time between samples; alarm durations are multiples of it
    watched: str  # in words
    pools: tuple[Pool, ...]
    processes: tuple[ProcessRow, ...]
    swap_in: float | None  # bytes per second, of the machine
    swap_out: float | None
    pressure: tuple[Pressure, ...]
    events: MemoryEvents
    said: Annotations = Annotations()
    entries: tuple[EntryRow, ...] | None = None  # None: not read
    groups: tuple[GroupRow, ...] | None = None  # None: not read
    gpu_copies: tuple[GpuCopyRow, ...] | None = None  # None: not read
    gpu_at: float | None = None  # sample time at which the GPUs were read; None: never
    cost: float | None = None  # CPU seconds used to take it
    notes: tuple[str, ...] = ()

    def pool(self, name: str) -> Pool | None:
        """The pool of that name, or None if the machine does not have it."""
        return next((pool for pool in self.pools if pool.name == name), None)


@dataclass(frozen=True, slots=True)
class AlarmSpan:
    """An alarm with its start and end; ``until`` is None while it is active."""

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
        """Used as a share of the size; None if unknown or the size is 0."""
        return None if self.used is None or not self.size else self.used / self.size


@dataclass(frozen=True, slots=True)
class Moment:
    """One step of a watch: the sample, all active alarms, and those that began or ended with it."""

    sample: Sample
    alarms: tuple[Alarm, ...] = ()
    begun: tuple[Alarm, ...] = ()
    ended: tuple[Alarm, ...] = ()
