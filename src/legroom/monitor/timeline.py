"""A watch as charts and views show it, in bounded memory: pools, marks, alarms and processes over time.

Alarms are evaluated by history_and_trend.py instead. A timeline is not thread-safe: an output that is read from another
thread takes a lock.

What a process takes of RAM is its PSS as last read, and its swap: shared pages are divided among those that map them,
so that the processes add up. What RssAnon changed since is added. Before PSS was read it is its anonymous memory.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby, pairwise
from statistics import median
from typing import NamedTuple

from legroom.monitor.history_and_trend import ThinningBuffer
from legroom.records.finding_and_alarm import Alarm
from legroom.records.watch_sample import AlarmSpan, Mark, Moment, PoolPoint, ProcessRow, Sample

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


_MOST = 16  # processes kept of one sample, the largest


class ProcessPoint(NamedTuple):
    """One process at one moment, in bytes; None is unknown."""

    pid: int
    taken: int  # of RAM and swap, see above
    anonymous: int | None
    file: int | None
    shmem: int | None
    swap: int | None
    steps: int | None = None  # training steps so far


class ProcessFrame(NamedTuple):
    """All processes at one moment."""

    when: float
    used: int | None  # of the pool RAM, by everything
    size: int | None
    points: tuple[ProcessPoint, ...]
    others: int  # bytes of processes that are not among the points


class ProcessTimeline:
    """What has happened so far."""

    def __init__(self) -> None:
        self._frames: ThinningBuffer[ProcessFrame] = ThinningBuffer(each=240, tiers=4)
        self.commands: dict[int, str] = {}

    def add(self, sample: Sample) -> None:
        """Add the next sample."""
        largest = sorted(sample.processes, key=taken, reverse=True)
        pool = sample.pool("ram")
        steps = {one.pid: one.steps for one in sample.said.process_steps}
        self._frames.add(
            ProcessFrame(
                sample.when,
                None if pool is None else pool.used,
                None if pool is None else pool.size,
                tuple(_point(row, steps.get(row.pid)) for row in largest[:_MOST]),
                sum(taken(row) for row in largest[_MOST:]),
            )
        )
        for row in largest[:_MOST]:
            self.commands[row.pid] = row.command
        if len(self.commands) > 40 * _MOST:
            shown = {point.pid for frame in self._frames for point in frame.points}
            self.commands = {pid: command for pid, command in self.commands.items() if pid in shown}

    def frames(self) -> list[ProcessFrame]:
        """All moments kept, oldest first."""
        return list(self._frames)

    def of(self, pid: int) -> Iterator[tuple[float, ProcessPoint | None]]:
        """One process over time; None while it did not exist, or was not among the largest."""
        for frame in self._frames:
            yield frame.when, next((point for point in frame.points if point.pid == pid), None)


def largest_pids(frames: list[ProcessFrame], most: int | None) -> list[int]:
    """The processes with the highest peaks, the highest first; None: all of them."""
    peaks: dict[int, int] = {}
    for frame in frames:
        for point in frame.points:
            peaks[point.pid] = max(peaks.get(point.pid, 0), point.taken)
    return sorted(peaks, key=lambda pid: -peaks[pid])[:most]


def taken(row: ProcessRow) -> int:
    """Bytes of RAM and swap that count for this process."""
    own = row.rss_anon if row.pss is None and row.rss_anon is not None else row.pss_estimate
    return (own or 0) + (row.swap or 0)


def is_as_read(row: ProcessRow) -> bool:
    """Whether `taken` is what was read: PSS, which has not changed by more than 1 % since."""
    return row.pss is not None and 100 * abs((row.pss_estimate or 0) - row.pss) <= row.pss


def over_steps(series: Iterable[tuple[float, ProcessPoint | None]]) -> list[tuple[float, ProcessPoint]]:
    """One process by its steps instead of by time; empty where it has made none that are known.

    A step may take longer than the time between two samples. Such samples lie evenly between the steps around them.
    Where steps are counted anew, only what follows is shown.
    """
    known = [(when, point, point.steps) for when, point in series if point is not None and point.steps is not None]
    known = known[max((at for at in range(1, len(known)) if known[at][2] < known[at - 1][2]), default=0) :]
    if not known or known[-1][2] == known[0][2]:
        return []
    found: list[tuple[float, ProcessPoint]] = []
    at = 0
    while at < len(known):
        end = at + 1
        while end < len(known) and known[end][2] == known[at][2]:
            end += 1
        following = known[end][2] if end < len(known) else known[at][2]
        for place in range(at, end):
            share = (place - at) / (end - at)
            found.append((known[at][2] + share * (following - known[at][2]), known[place][1]))
        at = end
    return found


def _point(row: ProcessRow, steps: int | None) -> ProcessPoint:
    return ProcessPoint(row.pid, taken(row), row.rss_anon, row.rss_file, row.rss_shmem, row.swap, steps)
