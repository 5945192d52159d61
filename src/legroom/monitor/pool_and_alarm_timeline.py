"""A watch as charts and views show it: pool use over time, marks, and alarms with start and end; in bounded memory.

The rules read history_and_trend.py instead. A timeline is not thread-safe: an output that is read from another thread
takes a lock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from itertools import groupby, islice, pairwise
from statistics import median

from legroom.monitor.process_timeline import ProcessTimeline
from legroom.records.finding_and_alarm import Alarm
from legroom.records.watch_sample import AlarmSpan, Mark, Moment, PoolPoint, Sample

RECENT = 900  # points kept as they are: 15 minutes at 1 Hz
_OLDER = 1024  # points kept of everything before, at most
_MOST_MARKS = 400
_MOST_ALARMS = 200
_GAP = 5.0  # intervals without a sample that break the line
_LATE = 2.5  # times between two points that are no gap yet


class Timeline:
    """What has happened so far."""

    def __init__(self) -> None:
        self.pools: dict[str, PoolSeries] = {}
        self.marks: deque[Mark] = deque(maxlen=_MOST_MARKS)
        self.processes = ProcessTimeline()
        self.moment: Moment | None = None
        self.began: float | None = None
        self._ended: deque[AlarmSpan] = deque(maxlen=_MOST_ALARMS)
        self._active: dict[tuple[str, str | None], AlarmSpan] = {}

    @property
    def sample(self) -> Sample | None:
        """The newest sample."""
        return self.moment.sample if self.moment else None

    def add(self, moment: Moment) -> None:
        """Add the next moment."""
        sample, before = moment.sample, self.sample
        if self.began is None:
            self.began = sample.when
        if before is not None and _interrupted(before, sample):
            for series in self.pools.values():
                series.add(PoolPoint(sample.when, None, None))
        for pool in sample.pools:
            self.pools.setdefault(pool.name, PoolSeries()).add(PoolPoint(sample.when, pool.used, pool.size))
        self.processes.add(sample)
        self.marks.extend(sample.said.marks)
        for alarm in moment.ended:
            span = self._active.pop(alarm.key, None) or _span(alarm)
            self._ended.append(replace(span, until=sample.when))
        self._active = {alarm.key: self._updated(alarm) for alarm in moment.alarms}
        self.moment = moment

    def alarm_spans(self) -> list[AlarmSpan]:
        """Ended and active alarms, in the order in which they began."""
        return sorted((*self._ended, *self._active.values()), key=lambda span: span.since)

    def points(self) -> dict[str, list[PoolPoint]]:
        """The points of each pool, oldest first; without pools of size 0, such as swap where there is none."""
        sizes = {pool.name: pool.size for pool in (self.sample.pools if self.sample else ())}
        return {name: series.points() for name, series in self.pools.items() if sizes.get(name) != 0}

    def _updated(self, alarm: Alarm) -> AlarmSpan:
        """Its message from the beginning, when it was useful, and its newest level."""
        before = self._active.get(alarm.key)
        return _span(alarm) if before is None else replace(before, level=alarm.level)


class PoolSeries:
    """Points of one pool in order of time; older ones are thinned so that no peak is lost."""

    def __init__(self) -> None:
        self._recent: deque[PoolPoint] = deque()
        self._older: list[PoolPoint] = []

    def add(self, point: PoolPoint) -> None:
        """Append a point."""
        self._recent.append(point)
        if len(self._recent) > RECENT:
            self._older.append(self._recent.popleft())
            if len(self._older) >= _OLDER:
                self._older = thin_points(self._older)

    def points(self) -> list[PoolPoint]:
        """All points kept, oldest first."""
        return [*self._older, *self._recent]

    def last(self, count: int) -> list[PoolPoint]:
        """The newest points, oldest of them first."""
        found = list(islice(reversed(self._recent), count))
        found.reverse()
        return found


def thin_points(points: Sequence[PoolPoint]) -> list[PoolPoint]:
    """Half as many: of every four the highest and the lowest, or the highest and a gap where there is one."""
    kept: list[PoolPoint] = []
    for start in range(0, len(points), 4):
        four = points[start : start + 4]
        known = [point for point in four if point.used is not None]
        gap = next((point for point in four if point.used is None), None)
        if not known:
            kept.append(four[0])
            continue
        highest = max(known, key=_used)
        other = gap if gap is not None else min(known, key=_used)
        kept += [highest] if other is highest else sorted((highest, other), key=lambda point: point.when)
    return kept


def column_shares(points: Sequence[PoolPoint], count: int) -> list[float | None]:
    """The highest used share in each of at most ``count`` equal spans of time; None where it is unknown.

    No span is shorter than the usual time between two points: the first minute is a short line, without gaps. Points
    are a little late now and then, so a span without one has the share before; one without any for longer has None.
    """
    if not points or count < 1:
        return []
    first, duration = points[0].when, points[-1].when - points[0].when
    usual = median([after.when - before.when for before, after in pairwise(points)]) if len(points) > 1 else 0.0
    count = min(count, round(duration / usual) + 1) if usual > 0 else 1
    shares: list[list[float | None]] = [[] for _ in range(count)]
    for point in points:
        shares[min(count - 1, int((point.when - first) / duration * count)) if duration > 0 else 0].append(point.share)
    longest = max(1, round(_LATE * usual / duration * count)) if duration > 0 else 1  # columns without a point
    found: list[float | None] = []
    for empty, run in groupby(shares, key=lambda column: not column):
        if empty:
            missing = len(list(run))
            found += [found[-1] if missing <= longest else None] * missing  # the first and the last have a point
        else:
            found += [max((share for share in column if share is not None), default=None) for column in run]
    return found


def _used(point: PoolPoint) -> int:
    return point.used if point.used is not None else -1


def _span(alarm: Alarm) -> AlarmSpan:
    return AlarmSpan(alarm.code, alarm.pool, alarm.level, alarm.message, alarm.since)


def _interrupted(before: Sample, now: Sample) -> bool:
    """Whether the watch was not running between the two: a second run in one log, or a machine that slept."""
    return now.clock < before.clock or now.when - before.when > _GAP * max(now.interval, before.interval)
