"""The memory of each watched process over time, for charts and views; in bounded memory.

What a process takes of RAM is its PSS as last read, and its swap: shared pages are divided among those that map them,
so that the processes add up. What RssAnon changed since is added. Before PSS was read it is its anonymous memory.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from legroom.monitor.history_and_trend import ThinningBuffer
from legroom.records.watch_sample import ProcessRow, Sample

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

    def frames(self, since: float = float("-inf"), until: float = float("inf")) -> list[ProcessFrame]:
        """All moments kept in that span, oldest first."""
        return [frame for frame in self._frames if since <= frame.when <= until]

    def of(self, pid: int, since: float = float("-inf")) -> Iterator[tuple[float, ProcessPoint | None]]:
        """One process over time; None while it did not exist, or was not among the largest."""
        for frame in self.frames(since):
            yield frame.when, next((point for point in frame.points if point.pid == pid), None)


def largest_pids(frames: list[ProcessFrame], most: int) -> list[int]:
    """The processes with the highest peaks, the highest first."""
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
