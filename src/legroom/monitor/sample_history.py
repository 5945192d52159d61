"""What has been seen so far, in bounded memory.

Covers: samples and each pool's course, thinned with age; the peak of each pool. Does not cover: judging them.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from legroom.model import ProcessRow, Sample

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
        self.samples: ThinningBuffer[Sample] = ThinningBuffer(older=_thinner)
        self.courses: dict[str, ThinningBuffer[Point]] = {}
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
                course = self.courses.setdefault(pool.name, ThinningBuffer())
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


Item = TypeVar("Item")


class ThinningBuffer(Generic[Item]):
    """The row; ``older`` may make an item smaller when it leaves the first tier."""

    def __init__(
        self,
        each: int = 256,
        tiers: int = 6,
        thin: int = 4,
        older: Callable[[Item], Item] = lambda item: item,
    ) -> None:
        self._rows: list[deque[Item]] = [deque() for _ in range(tiers)]
        self._fallen = [0] * tiers
        self._each, self._thin, self._older = each, thin, older

    def add(self, item: Item) -> None:
        """Put one at the end."""
        for number, row in enumerate(self._rows):
            row.append(item)
            if len(row) <= self._each:
                return
            item = row.popleft()
            self._fallen[number] += 1
            if self._fallen[number] % self._thin:
                return  # one of those that are forgotten
            if number == 0:
                item = self._older(item)

    def __iter__(self) -> Iterator[Item]:
        for row in reversed(self._rows):
            yield from row

    def __len__(self) -> int:
        return sum(len(row) for row in self._rows)

    def last(self, count: int = 1) -> list[Item]:
        """The newest few, oldest of them first; at most as many as the first tier holds."""
        row = self._rows[0]
        return [row[place] for place in range(max(0, len(row) - count), len(row))]
