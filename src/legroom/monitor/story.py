"""A watch as it is shown and drawn: every pool's course, what was marked, which alarms stood from when to when.

Covers: gathering that from moments, in bounded memory. Does not cover: showing it (terminal, web, plot).

Not for several threads at once: an output that is read from another thread than it is fed from locks around it.
"""

from __future__ import annotations

from collections import deque
from dataclasses import replace

from legroom.model import Alarm, AlarmSpan, Mark, Moment, PoolPoint, Sample
from legroom.monitor.course import Course

_MOST_MARKS = 400
_MOST_SPELLS = 200
_GAP = 5.0  # intervals without a sample: the watch was away, and the line is broken


class Story:
    """Everything so far."""

    def __init__(self) -> None:
        self.courses: dict[str, Course] = {}
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
            self.courses.setdefault(pool.name, Course()).add(PoolPoint(sample.when, pool.used, pool.size))
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
