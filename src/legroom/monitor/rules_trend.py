"""Alarms on where things are going: a pool that something fills without end. Pure.

Covers: the sentence with the time that is left, the rate and who grows. Does not cover: the arithmetic (trend.py).
"""

from __future__ import annotations

from collections.abc import Iterator

from legroom.model import Alarm, Sample
from legroom.monitor.growth import Growers, by_whom, growers, newcomers
from legroom.monitor.history import History
from legroom.monitor.rules_now import Standing
from legroom.monitor.trend import Trend, trend
from legroom.units import format_duration, format_size
from legroom.words import say

CRITICAL = 60  # intervals that are left
_PATIENCE = 4.0  # how much fuller a pool must get when it is new processes that fill it
_MOSTLY = 0.6


def filling(history: History, standing: Standing) -> Iterator[Alarm]:
    """Pools that will be full, and when."""
    sample = history.latest
    if sample is None:
        return
    for pool in sample.pools:
        found = trend(history.course(pool.name), sample.interval)
        if found is None:
            continue
        before = history.at(sample.clock - found.window) or sample
        if _starting_up(before, sample, pool.name, found):
            continue
        yield _alarm(pool.name, sample, found, growers(before, sample, pool.name))


def _starting_up(before: Sample, after: Sample, pool: str, found: Trend) -> bool:
    """Whether the growth is processes that came one after another: workers being started, most likely."""
    born = newcomers(before, after, pool)
    return born >= _MOSTLY * found.growth and found.window < _PATIENCE * 2 * found.full_in


def _alarm(pool: str, sample: Sample, found: Trend, who: Growers) -> Alarm:
    return Alarm(
        f"{pool.rstrip('0123456789')}-filling",
        pool,
        "critical" if found.full_in <= CRITICAL * sample.interval else "warning",
        say(
            "{pool} full in about {time} at {rate}, {who}",
            pool=pool,
            time=_about(found.full_in),
            rate=_rate(found.rate),
            who=by_whom(who, found.growth),
        ),
        sample.when,
        {
            "full_in_seconds": round(found.full_in, 1),
            "bytes_per_second": round(found.rate),
            "over_seconds": round(found.window, 1),
            "growth": round(found.growth),
        },
        who.pids,
    )


def _rate(per_second: float) -> str:
    """By the minute, as leaks are spoken of; by the hour where that reads as next to nothing."""
    if per_second * 60 >= 1 << 20:
        return say("{size}/min", size=format_size(int(per_second * 60)))
    return say("{size}/h", size=format_size(int(per_second * 3600)))


def _about(seconds: float) -> str:
    """No more digits than the forecast is worth."""
    if seconds >= 90:
        return format_duration(round(seconds / 60) * 60)
    return format_duration(round(seconds / 5) * 5 if seconds >= 20 else max(1, round(seconds)))


RULES = (filling,)
