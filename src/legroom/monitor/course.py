"""The course of a pool as it is drawn: the recent dots all, the older ones thinned so that no peak is lost.

Covers: dots in bounded memory, their thinning, how they fall into the columns of a screen. Does not cover: judging
them (history.py keeps what the rules need), drawing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from itertools import islice

from legroom.model import PoolPoint

RECENT = 900  # dots kept as they came: a quarter of an hour at one a second
_OLDER = 1024  # dots kept of everything before, at most


class Course:
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
                self._older = thinned(self._older)

    def dots(self) -> list[PoolPoint]:
        """All that is kept, oldest first."""
        return [*self._older, *self._recent]

    def last(self, count: int) -> list[PoolPoint]:
        """The newest few, oldest of them first."""
        found = list(islice(reversed(self._recent), count))
        found.reverse()
        return found


def thinned(dots: Sequence[PoolPoint]) -> list[PoolPoint]:
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


def columns(dots: Sequence[PoolPoint], count: int) -> list[float | None]:
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
