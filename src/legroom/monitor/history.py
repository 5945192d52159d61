"""What has been seen so far, in bounded memory.

Covers: samples and each pool's course, thinned with age; the peak of each pool. Does not cover: judging them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from legroom.model import ProcessRow, Sample
from legroom.monitor.tiers import Tiers

_ROWS_KEPT = 16  # processes in an old sample: those that hold most


class Point(NamedTuple):
    """One pool at one moment of the sample clock."""

    clock: float
    free: int
    size: int


class Peak(NamedTuple):
    """The most that was used of a pool, and when."""

    used: int
    when: float


class History:
    """Samples in a row, newest last; ``samples`` and ``courses`` reach back for days at falling density."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self.samples: Tiers[Sample] = Tiers(older=_thinner)
        self.courses: dict[str, Tiers[Point]] = {}
        self.peaks: dict[str, Peak] = {}

    def add(self, sample: Sample) -> None:
        """The next sample. One that turns the clock back begins a new history."""
        latest = self.latest
        if latest is not None and sample.clock < latest.clock:
            self._begin()
        self.samples.add(sample)
        for pool in sample.pools:
            if pool.used is not None and pool.used >= self.peaks.get(pool.name, (-1,))[0]:
                self.peaks[pool.name] = Peak(pool.used, sample.when)
            if pool.free is not None and pool.size:
                course = self.courses.setdefault(pool.name, Tiers())
                course.add(Point(sample.clock, pool.free, pool.size))

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        last = self.samples.last()
        return last[0] if last else None

    def course(self, pool: str) -> list[Point]:
        """A pool's points, oldest first."""
        return list(self.courses.get(pool, ()))

    def at(self, clock: float) -> Sample | None:
        """The last sample taken at or before ``clock``, else the oldest that is kept."""
        found: Sequence[Sample] = list(self.samples)
        place = bisect_right(found, clock, key=lambda sample: sample.clock)
        return found[max(0, place - 1)] if found else None


def _thinner(sample: Sample) -> Sample:
    """An old sample without the processes that hold least."""
    if len(sample.processes) <= _ROWS_KEPT:
        return sample
    most = sorted(sample.processes, key=_weight, reverse=True)[:_ROWS_KEPT]
    return replace(sample, processes=tuple(sorted(most, key=lambda row: row.pid)))


def _weight(row: ProcessRow) -> int:
    return max(row.host or 0, row.rss_shmem or 0, row.gpu or 0)
