"""Whether a pool is being filled by something that does not stop, and when it will be full.

Covers: a robust slope over windows of many lengths, and telling a leak from a warm-up. Pure.
Does not cover: who grows (growth.py), when to say it (alarms.py).

A leak and the first minutes of a healthy training both grow. What sets a leak apart, and is asked for here:

- it grows *evenly*: in the first half of the window as in the second (loading that levels off does not, nor does a
  single step such as a model or a validation set coming in);
- it grows *all the time*: nine of ten pairs of moments are in order (garbage that is collected falls back);
- it reaches *new ground*: what was used before the window began was less (a sawtooth has been there before);
- it has grown for *twice as long* as what is left would last. A cache that fills at an even pace cannot be told
  from a leak by its shape; one that ends with more than a third of the room left never gets there.

Lengths are counted in sampling intervals, so that a watch at 0.1 s sees in seconds what one at 1 s sees in minutes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

from legroom.model import ProcessRow, Sample
from legroom.monitor.sample_history import Point
from legroom.words import listed, say

_BINS = 16
SHORTEST = 32  # intervals of the shortest window
_WIDER = 2**0.5  # each window against the one before
HORIZON = 1800  # intervals: further ahead nobody can see
OUTLASTS = 2.0  # the window against the time that is left
_ROOMY = (
    0.45  # of the pool is free: an even growth from nothing has not outlasted it yet; with room for noise
)
_FEW = 9  # points at either end of a window for a first look
_ORDERED = 0.9  # share of pairs of bins that grow
_EVEN_FIRST, _EVEN_LAST = 0.4, 0.65  # slope of each half against the whole
_EVEN_NOW = 0.5  # slope of the last quarter against the whole
_STEADY = 0.6  # slope of the second half against the first
_OVER_NOISE = 4.0  # growth against the scatter around the line
_LEAST = 0.002  # growth as a share of the pool
_NEW_GROUND = 0.6  # share of the growth that lies above everything before


@dataclass(frozen=True, slots=True)
class Trend:
    """A pool that fills: bytes a second, seconds until it is full, over which seconds that was seen."""

    rate: float
    full_in: float
    window: float
    growth: float


def find_trend(points: Sequence[Point], interval: float) -> Trend | None:
    """The course of a pool as a leak, by the longest window that shows one; None where it is none."""
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
    left_over = max(0, -max(taken[-edge:]))  # of its peaks, which is where it will be full first
    # What has grown twice as long as the rest lasts has grown by twice the rest. Most pools most of the time have
    # not, and are spared what follows.
    if median(taken[-few:]) - median(taken[:few]) < max(_LEAST * size, left_over):
        return None
    times, levels = _binned(clocks, taken)
    if len(levels) < _BINS:
        return None  # samples are missing
    slope = theil_sen(times, levels)
    if slope <= 0 or _ordered(levels) < _ORDERED:
        return None
    half = len(levels) // 2
    first, last = theil_sen(times[:half], levels[:half]), theil_sen(times[half:], levels[half:])
    if first < _EVEN_FIRST * slope or last < max(_EVEN_LAST * slope, _STEADY * first):
        return None
    quarter = half + half // 2
    if theil_sen(times[quarter:], levels[quarter:]) < _EVEN_NOW * slope:
        return None  # it has just come to an end
    growth = slope * window
    if growth < _OVER_NOISE * _scatter(times, levels, slope):
        return None
    left = left_over / slope
    if left > HORIZON * interval or window < OUTLASTS * left:
        return None
    return Trend(slope, left, window, growth)


def _new_ground(taken: list[int], first: int, seen: Trend) -> bool:
    return first == 0 or max(taken[:first]) <= taken[-1] - _NEW_GROUND * seen.growth


def _binned(clocks: list[float], taken: list[int]) -> tuple[list[float], list[float]]:
    """The middle of each sixteenth of the window; empty ones are left out."""
    start, width = clocks[0], (clocks[-1] - clocks[0]) / _BINS
    edges = [0, *(bisect_left(clocks, start + width * number) for number in range(1, _BINS)), len(clocks)]
    spans = [(low, high) for low, high in pairwise(edges) if low < high]
    times = [(clocks[low] + clocks[high - 1]) / 2 for low, high in spans]
    return times, [sorted(taken[low:high])[(high - low) // 2] for low, high in spans]


def theil_sen(times: Sequence[float], levels: Sequence[float]) -> float:
    """The median of the slopes of all pairs: a third of the points may be wild and it does not move."""
    slopes = sorted(
        (levels[later] - levels[earlier]) / (times[later] - times[earlier])
        for later in range(len(levels))
        for earlier in range(later)
    )
    return (slopes[(len(slopes) - 1) // 2] + slopes[len(slopes) // 2]) / 2


def _ordered(levels: Sequence[float]) -> float:
    pairs = [levels[later] > levels[earlier] for later in range(len(levels)) for earlier in range(later)]
    return sum(pairs) / len(pairs)


def _scatter(times: Sequence[float], levels: Sequence[float], slope: float) -> float:
    """The median distance from the line."""
    rest = [level - slope * clock for clock, level in zip(times, levels, strict=True)]
    middle = median(rest)
    return median(abs(one - middle) for one in rest)


_MOST_NAMED = 4
_WORTH_NAMING = 0.1  # of the largest growth


@dataclass(frozen=True, slots=True)
class GrowingProcesses:
    """Processes that grew, most first, and all their growth together."""

    rows: tuple[ProcessRow, ...]
    total: int

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(row.pid for row in self.rows)


def growing_processes(before: Sample, after: Sample, pool: str) -> GrowingProcesses:
    """Who holds more of that pool in ``after`` than in ``before``; who was not there then held nothing."""
    held = _holding(pool)
    earlier = {row.pid: held(row) or 0 for row in before.processes}
    grown = [(amount - earlier.get(row.pid, 0), row) for row in after.processes if (amount := held(row))]
    grown = sorted((pair for pair in grown if pair[0] > 0), key=lambda pair: -pair[0])
    worth = [row for amount, row in grown if amount >= _WORTH_NAMING * grown[0][0]]
    return GrowingProcesses(tuple(worth), sum(amount for amount, _ in grown))


def held_by_new_processes(before: Sample, after: Sample, pool: str) -> int:
    """What processes hold of that pool that came after ``before``."""
    held = _holding(pool)
    # By their birth: an old sample lists only those that held most.
    born = [row for row in after.processes if row.born is not None and row.born > before.clock]
    return sum(held(row) or 0 for row in born)


def describe_growth(found: GrowingProcesses, growth: float) -> str:
    """The growers in words, for the end of a sentence; honest where they do not explain it."""
    if not found.rows:
        return say("from no process that is watched")
    names = _names(found.rows)
    if found.total < 0.3 * growth:
        return say("mostly not from what is watched, of which {names} grew most", names=names)
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
    return (
        say("pids {named} and {more} more", named=named, more=more)
        if more > 0
        else say("pids {named}", named=named)
    )


def _holding(pool: str) -> Callable[[ProcessRow], int | None]:
    if pool == "shm":
        return lambda row: row.rss_shmem
    if pool == "swap":
        return lambda row: row.swap
    if pool == "fds":
        return lambda row: row.fds
    if pool.startswith("gpu"):
        return lambda row: row.gpu
    return lambda row: row.host
