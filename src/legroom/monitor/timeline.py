"""A watch as it is shown and drawn: every pool's course, what was marked, which alarms stood from when to when.

Covers: gathering that from moments, in bounded memory. Does not cover: showing it (terminal, web, plot).

Not for several threads at once: an output that is read from another thread than it is fed from locks around it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import islice

from legroom.model import Alarm, AlarmSpan, Mark, Moment, PoolPoint, Sample

_MOST_MARKS = 400
_MOST_SPELLS = 200
_GAP = 5.0  # intervals without a sample: the watch was away, and the line is broken


class Timeline:
    """Everything so far."""

    def __init__(self) -> None:
        self.courses: dict[str, PoolSeries] = {}
        self.marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self.over: deque[AlarmSpan] = deque(maxlen=_MOST_SPELLS)
        self.moment: Moment | None = None
        self.began: float | None = None
        self._standing: dict[tuple[str, str | None], AlarmSpan] = {}

    @property
    def sample(self) -> Sample | None:
        """The newest sample."""
        return self.moment.sample if self.moment else None

    def add(self, moment: Moment) -> None:
        """What comes next."""
        sample, before = moment.sample, self.sample
        if self.began is None:
            self.began = sample.when
        if before is not None and _away(before, sample):
            for course in self.courses.values():
                course.add(PoolPoint(sample.when, None, None))
        for pool in sample.pools:
            self.courses.setdefault(pool.name, PoolSeries()).add(PoolPoint(sample.when, pool.used, pool.size))
        self.marks.extend(sample.said.marks)
        for alarm in moment.ended:
            spell = self._standing.pop(alarm.key, None) or _spell(alarm)
            self.over.append(replace(spell, until=sample.when))
        self._standing = {alarm.key: self._told(alarm) for alarm in moment.alarms}
        self.moment = moment

    def spells(self) -> list[AlarmSpan]:
        """Every alarm that is kept, in the order of their beginnings."""
        return sorted((*self.over, *self._standing.values()), key=lambda spell: spell.since)

    def dots(self) -> dict[str, list[PoolPoint]]:
        """Every pool's dots, oldest first; pools of no size, such as swap where there is none, are left out."""
        sizes = {pool.name: pool.size for pool in (self.sample.pools if self.sample else ())}
        return {name: course.dots() for name, course in self.courses.items() if sizes.get(name) != 0}

    def _told(self, alarm: Alarm) -> AlarmSpan:
        """What it said when it began, which is when it was of use; its worst level."""
        before = self._standing.get(alarm.key)
        return _spell(alarm) if before is None else replace(before, level=alarm.level)


def _spell(alarm: Alarm) -> AlarmSpan:
    return AlarmSpan(alarm.code, alarm.pool, alarm.level, alarm.message, alarm.since)


def _away(before: Sample, now: Sample) -> bool:
    """Whether there was no watch between the two: a second run in one log, a machine that slept."""
    return now.clock < before.clock or now.when - before.when > _GAP * max(now.interval, before.interval)


RECENT = 900  # dots kept as they came: a quarter of an hour at one a second
_OLDER = 1024  # dots kept of everything before, at most


class PoolSeries:
    """Dots in the order of time; never more than RECENT and 1024."""

    def __init__(self) -> None:
        self._recent: deque[PoolPoint] = deque()
        self._older: list[PoolPoint] = []

    def add(self, dot: PoolPoint) -> None:
        """The next one."""
        self._recent.append(dot)
        if len(self._recent) > RECENT:
            self._older.append(self._recent.popleft())
            if len(self._older) >= _OLDER:
                self._older = thin_points(self._older)

    def dots(self) -> list[PoolPoint]:
        """All that is kept, oldest first."""
        return [*self._older, *self._recent]

    def last(self, count: int) -> list[PoolPoint]:
        """The newest few, oldest of them first."""
        found = list(islice(reversed(self._recent), count))
        found.reverse()
        return found


def thin_points(dots: Sequence[PoolPoint]) -> list[PoolPoint]:
    """Half as many: of every four the highest and the lowest, or the highest and a gap where there is one."""
    kept: list[PoolPoint] = []
    for start in range(0, len(dots), 4):
        four = dots[start : start + 4]
        known = [dot for dot in four if dot.used is not None]
        gap = next((dot for dot in four if dot.used is None), None)
        if not known:
            kept.append(four[0])
            continue
        highest = max(known, key=_height)
        other = gap if gap is not None else min(known, key=_height)
        kept += [highest] if other is highest else sorted((highest, other), key=lambda dot: dot.when)
    return kept


def column_shares(dots: Sequence[PoolPoint], count: int) -> list[float | None]:
    """The highest share in each of so many equal spans of time; None where nothing is known of a span."""
    if not dots or count < 1:
        return []
    first, span = dots[0].when, dots[-1].when - dots[0].when
    found: list[float | None] = [None] * count
    for dot in dots:
        share = dot.share
        if share is not None:
            place = min(count - 1, int((dot.when - first) / span * count)) if span > 0 else count - 1
            before = found[place]
            found[place] = share if before is None else max(before, share)
    return found


def _height(dot: PoolPoint) -> int:
    return dot.used if dot.used is not None else -1
