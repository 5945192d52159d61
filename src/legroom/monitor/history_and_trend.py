"""Samples and free space over time in bounded memory, and the trends in them: a leak, when a pool will be full.

All recent samples are kept, older ones are thinned out. What charts draw is kept in timeline.py.

The first minutes of a healthy training run grow too. A leak differs in four ways, and all four are required:

- it grows *evenly*: the second half of the window like the first. Loading levels off, a model arrives in one step;
- it grows *all the time*: nine of ten pairs of samples are in order. Collected garbage falls back;
- it reaches *new ground*: less was used before the window began. A sawtooth returns to the same level;
- it has grown *twice as long* as the free space will last. A cache that fills evenly has the shape of a leak, but one
  that stops with more than a third of the pool free never reaches this point.

Lengths are counted in sampling intervals: a watch at 0.1 s finds in seconds what one at 1 s finds in minutes.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median
from typing import Generic, NamedTuple, TypeVar

from legroom.messages import listed, say
from legroom.records.watch_sample import ProcessRow, Sample

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
        self, each: int = 256, tiers: int = 6, thin: int = 4, shrink: Callable[[Item], Item] = lambda item: item
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


_BINS = 16
SHORTEST = 32  # window, in intervals
_WIDER = 2**0.5  # each window relative to the one before
_HORIZON = 1800  # intervals: no forecast further ahead
_OUTLASTS = 2.0  # window relative to the time left
# With this share of the pool free, even growth from empty has not yet lasted twice the time left; includes noise.
_ROOMY = 0.45
_FEW = 9  # points at either end of a window for the quick test
_ORDERED = 0.9  # share of pairs of bins that must grow
_EVEN_FIRST, _EVEN_LAST = 0.4, 0.65  # slope of each half relative to the whole
_EVEN_NOW = 0.5  # slope of the last quarter relative to the whole
_STEADY = 0.6  # slope of the second half relative to the first
_OVER_NOISE = 4.0  # growth relative to the scatter around the line
_LEAST = 0.002  # growth, as a share of the pool
_NEW_GROUND = 0.6  # share of the growth above all earlier levels


@dataclass(frozen=True, slots=True)
class Trend:
    """A pool that is filling up."""

    rate: float  # bytes per second
    full_in: float  # seconds
    window: float  # seconds over which it was measured
    growth: float  # bytes in the window


def find_trend(points: Sequence[FreePoint], interval: float) -> Trend | None:
    """The leak in the longest window that shows one; None where no window does."""
    if len(points) < SHORTEST or points[-1].free > _ROOMY * points[-1].size:
        return None
    clocks = [point.clock for point in points]
    now, span = clocks[-1], clocks[-1] - clocks[0]
    taken = [-point.free for point in points]
    window, found = SHORTEST * interval, None
    while window <= span * 1.001:
        first = bisect_left(clocks, now - window)
        seen = _leak(clocks[first:], taken[first:], points[-1].size, interval)
        if seen is not None and _new_ground(taken, first, seen):
            found = seen
        window *= _WIDER
    return found


def _leak(clocks: list[float], taken: list[int], size: int, interval: float) -> Trend | None:
    window = clocks[-1] - clocks[0]
    edge = max(1, len(taken) // _BINS)
    few = min(edge, _FEW)
    left_over = max(0, -max(taken[-edge:]))  # above the peaks, which fill the pool first
    # Quick test, since it fails for most pools most of the time: growth for twice the time left means growth by twice
    # what is left.
    if median(taken[-few:]) - median(taken[:few]) < max(_LEAST * size, left_over):
        return None
    times, levels = _binned(clocks, taken)
    if len(levels) < _BINS:
        return None  # samples are missing
    slope = theil_sen(times, levels)
    if slope <= 0 or share_in_order(levels) < _ORDERED:
        return None
    half = len(levels) // 2
    first, last = theil_sen(times[:half], levels[:half]), theil_sen(times[half:], levels[half:])
    if first < _EVEN_FIRST * slope or last < max(_EVEN_LAST * slope, _STEADY * first):
        return None
    quarter = half + half // 2
    if theil_sen(times[quarter:], levels[quarter:]) < _EVEN_NOW * slope:
        return None  # it has just stopped
    growth = slope * window
    if growth < _OVER_NOISE * scatter(times, levels, slope):
        return None
    left = left_over / slope
    if left > _HORIZON * interval or window < _OUTLASTS * left:
        return None
    return Trend(slope, left, window, growth)


def _new_ground(taken: list[int], first: int, seen: Trend) -> bool:
    return first == 0 or max(taken[:first]) <= taken[-1] - _NEW_GROUND * seen.growth


def _binned(clocks: list[float], taken: list[int]) -> tuple[list[float], list[float]]:
    """The median of each sixteenth of the window; empty ones are left out."""
    start, width = clocks[0], (clocks[-1] - clocks[0]) / _BINS
    edges = [0, *(bisect_left(clocks, start + width * number) for number in range(1, _BINS)), len(clocks)]
    spans = [(low, high) for low, high in pairwise(edges) if low < high]
    times = [(clocks[low] + clocks[high - 1]) / 2 for low, high in spans]
    return times, [sorted(taken[low:high])[(high - low) // 2] for low, high in spans]


def theil_sen(times: Sequence[float], levels: Sequence[float]) -> float:
    """The median slope of all pairs (Theil-Sen): robust against up to 29 % outliers."""
    slopes = sorted(
        (levels[later] - levels[earlier]) / (times[later] - times[earlier])
        for later in range(len(levels))
        for earlier in range(later)
    )
    return (slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2]) / 2


def share_in_order(levels: Sequence[float]) -> float:
    """The share of pairs in which the later one is larger."""
    pairs = [levels[later] > levels[earlier] for later in range(len(levels)) for earlier in range(later)]
    return sum(pairs) / len(pairs)


def scatter(times: Sequence[float], levels: Sequence[float], slope: float) -> float:
    """The median distance from the line."""
    rest = [level - slope * clock for clock, level in zip(times, levels, strict=True)]
    middle = median(rest)
    return median(abs(one - middle) for one in rest)


_MOST_NAMED = 4
_WORTH_NAMING = 0.1  # of the largest growth


@dataclass(frozen=True, slots=True)
class GrowingProcesses:
    """Processes that grew, the fastest first.

    Shared memory counts for each process that maps it, so these figures rank processes and are not shares of a pool.
    """

    rows: tuple[ProcessRow, ...]
    total: int  # bytes, of all processes that grew

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(row.pid for row in self.rows)


def growing_processes(before: Sample, after: Sample, pool: str) -> GrowingProcesses:
    """Processes that hold more of the pool in ``after`` than in ``before``."""
    held = _usage_of(pool)
    earlier = {row.pid: held(row) for row in before.processes}
    if pool.startswith("gpu"):  # a process that does not use a GPU is not in its list
        earlier = {pid: amount or 0 for pid, amount in earlier.items()}
    known = ((held(row), earlier.get(row.pid, 0), row) for row in after.processes)
    grown = [(now - then, row) for now, then, row in known if now and then is not None]
    grown = sorted((pair for pair in grown if pair[0] > 0), key=lambda pair: -pair[0])
    worth = [row for amount, row in grown if amount >= _WORTH_NAMING * grown[0][0]]
    return GrowingProcesses(tuple(worth), sum(amount for amount, _ in grown))


def held_by_new_processes(before: Sample, after: Sample, pool: str) -> int:
    """Bytes of the pool held by processes that started after ``before``."""
    held = _usage_of(pool)
    # By their start: an old sample lists only the largest processes.
    new = [row for row in after.processes if row.born is not None and row.born > before.clock]
    return sum(held(row) or 0 for row in new)


def describe_growth(found: GrowingProcesses, growth: float) -> str:
    """Which processes grow, for the end of a sentence; reports where they do not explain the growth."""
    if not found.rows:
        return say("not from any watched process")
    names = _names(found.rows)
    if found.total < 0.3 * growth:
        return say("mostly from processes that are not watched; of the watched ones {names} grew most", names=names)
    return say("from {names}", names=names)


def _names(rows: Sequence[ProcessRow]) -> str:
    pids = {row.pid for row in rows}
    if len(rows) == 1:
        return say("pid {pid} ({command})", pid=rows[0].pid, command=rows[0].command[:60])
    parents = {row.parent for row in rows}
    for head in parents & pids:
        if all(row.pid == head or row.parent == head for row in rows):
            count = len(rows) - 1
            return (
                say("pid {pid} and its worker", pid=head)
                if count == 1
                else say("pid {pid} and its {count} workers", pid=head, count=count)
            )
    if len(parents) == 1:
        return say("{count} workers of pid {pid}", count=len(rows), pid=parents.pop())
    named = listed(str(row.pid) for row in rows[:_MOST_NAMED])
    more = len(rows) - _MOST_NAMED
    return say("pids {named} and {more} more", named=named, more=more) if more > 0 else say("pids {named}", named=named)


def _usage_of(pool: str) -> Callable[[ProcessRow], int | None]:
    if pool == "shm":
        return lambda row: row.rss_shmem
    if pool == "swap":
        return lambda row: row.swap
    if pool == "fds":
        return lambda row: row.fds
    if pool.startswith("gpu"):
        return lambda row: row.gpu
    return lambda row: row.host
