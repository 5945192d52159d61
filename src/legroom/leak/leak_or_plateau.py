"""Tell a leak from everything else that grows, by the shape of one series over steps. Pure functions.

The first half of a run is warm-up and is not judged: models arrive, caches fill, allocators take memory. A leak grows
in all of the second half: evenly, without falling back, not in one jump, and up to the end. What has stopped is a
plateau, however large it is. A series that is too short to tell is called so.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Literal

from legroom.monitor.history_and_trend import scatter, share_in_order, theil_sen

Shape = Literal["steady", "flat", "plateau", "jump", "falls", "recent", "short"]
Points = Sequence[tuple[float, float]]  # (step, value), in the order of steps

FEWEST = 6  # points in the half that is judged
_ENOUGH = 8  # points for which the judged part is extended back to at most this share of the run
_EARLIEST = 0.25
_BINS = 8
_FALLS = 0.3  # of the growth that may be lost again
_JUMP = 0.5  # of the growth in one gap between two points
_JUMP_OVER_GAP = 3.0  # times the share of steps in that gap
_SLOWER = 0.5  # second half of the judged part, relative to its first half
_NOW = 0.4  # last quarter relative to the whole
_BEGAN = 0.25  # first half relative to the second: less is growth that has only begun
_OVER_NOISE = 4.0  # growth relative to the scatter around the line
_PAUSE = 4.0  # usual gaps between two rises after which an exact series has stopped
_SHORTEST_PAUSE = 0.08  # of the judged part
_SINCE = 0.4  # slope of an earlier part that still belongs to the growth


@dataclass(frozen=True, slots=True)
class SeriesTrend:
    """How a series changes: its shape, and for growth the rate per step, and since which step."""

    shape: Shape
    rate: float = 0.0
    since: float = 0.0
    growth: float = 0.0  # in the half that was judged
    evenness: float = 0.0  # 0 to 1: how even the growth is

    @property
    def leaks(self) -> bool:
        return self.shape == "steady"


def trend(points: Points, *, exact: bool = False, least: float = 0.0) -> SeriesTrend:
    """The shape of a series; ``least`` is the smallest growth that counts.

    ``exact``: a count without noise, such as the length of a list. Its last rises show whether it has stopped.
    """
    known = _one_per_step(points)
    if len(known) < FEWEST:
        return SeriesTrend("short")
    judged = _judged(known)
    if len(judged) < FEWEST:
        return SeriesTrend("short")
    steps, values = _binned(judged)
    if len(steps) < FEWEST - 1:
        return SeriesTrend("short")
    span = judged[-1][0] - judged[0][0]
    slope = theil_sen(steps, values)
    growth = slope * span
    highest = max(values) - min(values)
    if highest <= least:
        return SeriesTrend("flat")
    fallen = _fallen([value for _, value in judged] if exact else values)
    if fallen > _FALLS * highest:
        return SeriesTrend("falls")
    if _jumped(judged, steps, values):
        return SeriesTrend("jump")
    if growth <= max(least, 0.0) or growth < _OVER_NOISE * scatter(steps, values, slope):
        return SeriesTrend("plateau" if highest > 0.0 and values[-1] - values[0] > 0.5 * highest else "flat")
    half = len(steps) // 2
    early, late = theil_sen(steps[: half + 1], values[: half + 1]), theil_sen(steps[half:], values[half:])
    end = theil_sen(steps[-3:], values[-3:])
    if late < _SLOWER * early or end < _NOW * slope or (exact and _paused(judged, span)):
        return SeriesTrend("plateau")
    if early < _BEGAN * late:
        return SeriesTrend("recent", late, judged[len(judged) // 2][0], growth)
    evenness = min(early, late) / max(early, late) * share_in_order(values)
    return SeriesTrend("steady", slope, min(judged[0][0], _since(known, slope)), growth, evenness)


def _judged(known: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """The second half of the steps; where few samples were taken there, up to three quarters."""
    first, last = known[0][0], known[-1][0]
    half = bisect_left(known, ((first + last) / 2,))
    earliest = bisect_left(known, (first + _EARLIEST * (last - first),))
    return known[max(earliest, min(half, len(known) - _ENOUGH)) :]


def _one_per_step(points: Points) -> list[tuple[float, float]]:
    """The last value of each step."""
    return sorted(dict(points).items())


def _binned(points: Points) -> tuple[list[float], list[float]]:
    """The median of each eighth of the steps, empty ones left out; few points are taken as they are."""
    if len(points) <= _BINS + 2:
        return [step for step, _ in points], [value for _, value in points]
    first, last = points[0][0], points[-1][0]
    bins: dict[int, list[tuple[float, float]]] = {}
    for step, value in points:
        bins.setdefault(min(_BINS - 1, int((step - first) / (last - first) * _BINS)), []).append((step, value))
    steps = [sum(step for step, _ in one) / len(one) for one in bins.values()]
    return steps, [median(value for _, value in one) for one in bins.values()]


def _fallen(values: Sequence[float]) -> float:
    """The largest fall below an earlier value."""
    top = most = 0.0
    for number, value in enumerate(values):
        top = value if number == 0 else max(top, value)
        most = max(most, top - value)
    return most


def _jumped(judged: Points, steps: Sequence[float], values: Sequence[float]) -> bool:
    """Whether most of the growth came in one gap, of the points or of their medians."""
    for series in (judged, list(zip(steps, values, strict=True))):
        whole = series[-1][1] - series[0][1]
        span = series[-1][0] - series[0][0]
        if whole <= 0 or span <= 0:
            continue
        for (before, low), (after, high) in pairwise(series):
            share, gap = (high - low) / whole, (after - before) / span
            rest = whole - (high - low)
            if share > _JUMP and share > _JUMP_OVER_GAP * gap and rest < whole / 2:
                return True
    return False


def _paused(judged: Points, span: float) -> bool:
    """Whether an exact series has not risen for much longer than it usually takes between two rises."""
    rises = [after for (_, low), (after, high) in pairwise(judged) if high > low]
    if not rises:
        return True
    gaps = [after - before for before, after in pairwise(rises)] or [span]
    return judged[-1][0] - rises[-1] > max(_PAUSE * median(gaps), _SHORTEST_PAUSE * span)


def _since(points: Points, slope: float) -> float:
    """The step at which this growth began: back from the end while the medians still rise that fast."""
    steps, values = _binned(points)
    began = steps[-1]
    for number in range(len(steps) - 1, 0, -1):
        rise = (values[number] - values[number - 1]) / (steps[number] - steps[number - 1])
        if rise < _SINCE * slope:
            return began
        began = steps[number - 1]
    return points[0][0]
