"""What `legroom leak` found: the lines that make memory grow, per process."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

Kind = Literal["python", "tensors", "graph", "shm-files", "native", "copy-on-write", "unknown"]
Certainty = Literal["high", "medium", "low"]
Per = Literal["step", "second"]


@dataclass(frozen=True, slots=True)
class SourceLine:
    """A line of the user's source."""

    file: str
    line: int


@dataclass(frozen=True, slots=True)
class GrowingSite:
    """One cause of growth. What is unknown is None."""

    kind: Kind
    pool: str  # ram, shm, gpu0
    rate: float  # bytes per step, or per second where there are no steps
    per: Per
    since: float  # step, or second
    growth: int  # bytes in the part of the run that was judged
    certainty: Certainty
    holder: str | None = None  # the variable that keeps it: history, self.cache
    items: str | None = None  # the type of what it keeps
    lines: tuple[SourceLine, ...] = ()  # where it is kept; several if the source fills it in several lines
    created: SourceLine | None = None  # where what it keeps was made
    share: float | None = None  # of the holder's bytes that the first of several lines adds, where that was seen
    rate_per_second: float | None = None
    full_in: float | None = None  # seconds until the pool is full at this rate
    why: tuple[str, ...] = ()  # what speaks for it, in words
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)  # (step, bytes), for charts

    @property
    def line(self) -> SourceLine | None:
        """The line to look at first: where it is kept, else where it was made."""
        return self.lines[0] if self.lines else self.created


@dataclass(frozen=True, slots=True)
class PoolGrowth:
    """What a process uses of one pool, from step to step."""

    pool: str
    rate: float  # bytes per step or second in the second half
    growing: bool  # whether it has the shape of a leak
    explained: float | None  # share of the rate that the sites explain; None where it does not grow
    points: tuple[tuple[float, float], ...] = field(default=(), repr=False)


@dataclass(frozen=True, slots=True)
class ProcessGrowth:
    """One process of the job."""

    pid: int
    parent: int
    command: str
    role: str  # main, worker, forked
    rank: str | None
    per: Per
    steps: int | None  # counted; None where the process makes none
    seconds: float
    sites: tuple[GrowingSite, ...] = ()
    small: tuple[GrowingSite, ...] = ()  # grow too, but too slowly to matter
    pools: tuple[PoolGrowth, ...] = ()
    reason: str | None = None  # why nothing can be told: too few steps
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class LeakReport:
    """All processes of a job."""

    processes: tuple[ProcessGrowth, ...]
    command: tuple[str, ...] = ()

    @property
    def sites(self) -> tuple[GrowingSite, ...]:
        """The sites of all processes, the fastest first."""
        return tuple(sorted((site for one in self.processes for site in one.sites), key=lambda site: -site.rate))
