"""Who grows: the processes behind a pool's course, in numbers and in words. Pure.

Covers: comparing two samples. Does not cover: whether the growth matters (trend.py, alarms.py).

What processes share counts for each of them, so that shares of the whole are not computed from these figures,
only who comes first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from legroom.model import ProcessRow, Sample
from legroom.words import listed, say

_MOST_NAMED = 4
_WORTH_NAMING = 0.1  # of the largest growth


@dataclass(frozen=True, slots=True)
class Growers:
    """Processes that grew, most first, and all their growth together."""

    rows: tuple[ProcessRow, ...]
    total: int

    @property
    def pids(self) -> tuple[int, ...]:
        return tuple(row.pid for row in self.rows)


def growers(before: Sample, after: Sample, pool: str) -> Growers:
    """Who holds more of that pool in ``after`` than in ``before``; who was not there then held nothing."""
    held = _holding(pool)
    earlier = {row.pid: held(row) or 0 for row in before.processes}
    grown = [(amount - earlier.get(row.pid, 0), row) for row in after.processes if (amount := held(row))]
    grown = sorted((pair for pair in grown if pair[0] > 0), key=lambda pair: -pair[0])
    worth = [row for amount, row in grown if amount >= _WORTH_NAMING * grown[0][0]]
    return Growers(tuple(worth), sum(amount for amount, _ in grown))


def newcomers(before: Sample, after: Sample, pool: str) -> int:
    """What processes hold of that pool that came after ``before``."""
    held = _holding(pool)
    # By their birth: an old sample lists only those that held most.
    born = [row for row in after.processes if row.born is not None and row.born > before.clock]
    return sum(held(row) or 0 for row in born)


def by_whom(found: Growers, growth: float) -> str:
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
