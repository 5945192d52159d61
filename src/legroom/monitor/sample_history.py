"""Samples and free space over time, in bounded memory: all recent samples, older ones thinned out.

The alarm rules read this history. What charts draw is kept in timeline.py.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Generic, NamedTuple, TypeVar

from legroom.records import ProcessRow, Sample

Item = TypeVar("Item")
_ROWS_KEPT = 16  # processes in an old sample, the largest


class FreePoint(NamedTuple):
    """Free space of a pool at one sample."""

    clock: float
    free: int
    size: int


class Peak(NamedTuple):
    """The highest use of a pool."""

    used: int
    when: float


class History:
    """Samples, oldest first, and the free space and the peak of each pool; reaches back four days at 1 Hz."""

    def __init__(self) -> None:
        self._clear()

    def _clear(self) -> None:
        self.samples: ThinningBuffer[Sample] = ThinningBuffer(shrink=keep_largest_processes)
        self.peaks: dict[str, Peak] = {}
        self._free: dict[str, ThinningBuffer[FreePoint]] = {}

    def add(self, sample: Sample) -> None:
        """Add a sample. A clock that runs backwards starts a new history: a second run in one log."""
        latest = self.latest
        if latest is not None and sample.clock < latest.clock:
            self._clear()
        self.samples.add(sample)
        for pool in sample.pools:
            if pool.used is not None and pool.used >= self.peaks.get(pool.name, (-1,))[0]:
                self.peaks[pool.name] = Peak(pool.used, sample.when)
            if pool.free is not None and pool.size:
                points = self._free.setdefault(pool.name, ThinningBuffer())
                points.add(FreePoint(sample.clock, pool.free, pool.size))

    @property
    def latest(self) -> Sample | None:
        """The newest sample."""
        last = self.samples.last()
        return last[0] if last else None

    def free_over_time(self, pool: str) -> list[FreePoint]:
        """Free space of a pool, oldest first."""
        return list(self._free.get(pool, ()))

    def at(self, clock: float) -> Sample | None:
        """The last sample taken at or before ``clock``, else the oldest kept."""
        found: Sequence[Sample] = list(self.samples)
        index = bisect_right(found, clock, key=lambda sample: sample.clock)
        return found[max(0, index - 1)] if found else None


class ThinningBuffer(Generic[Item]):
    """A sequence of bounded length: all recent items, ever fewer of the older ones.

    Items that leave a tier go into the next one, one in ``thin`` of them; the others are dropped. Six tiers of 256,
    thinned by four, reach back four days at one item a second. ``shrink`` may make an item smaller when it leaves the
    first tier.
    """

    def __init__(
        self,
        each: int = 256,
        tiers: int = 6,
        thin: int = 4,
        shrink: Callable[[Item], Item] = lambda item: item,
    ) -> None:
        self._tiers: list[deque[Item]] = [deque() for _ in range(tiers)]
        self._left = [0] * tiers  # items that left each tier
        self._each, self._thin, self._shrink = each, thin, shrink

    def add(self, item: Item) -> None:
        """Append an item."""
        for number, tier in enumerate(self._tiers):
            tier.append(item)
            if len(tier) <= self._each:
                return
            item = tier.popleft()
            self._left[number] += 1
            if self._left[number] % self._thin:
                return
            if number == 0:
                item = self._shrink(item)

    def __iter__(self) -> Iterator[Item]:
        for tier in reversed(self._tiers):
            yield from tier

    def __len__(self) -> int:
        return sum(len(tier) for tier in self._tiers)

    def last(self, count: int = 1) -> list[Item]:
        """The newest items, oldest of them first; at most as many as the first tier holds."""
        tier = self._tiers[0]
        return [tier[index] for index in range(max(0, len(tier) - count), len(tier))]


def keep_largest_processes(sample: Sample, most: int = _ROWS_KEPT) -> Sample:
    """The sample with only its largest processes, by pid."""
    if len(sample.processes) <= most:
        return sample
    largest = sorted(sample.processes, key=largest_use, reverse=True)[:most]
    return replace(sample, processes=tuple(sorted(largest, key=lambda row: row.pid)))


def largest_use(row: ProcessRow) -> int:
    """The most bytes that a process holds of any pool."""
    return max(row.host or 0, row.rss_shmem or 0, row.gpu or 0)
