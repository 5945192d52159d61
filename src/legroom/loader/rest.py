"""What is left of an epoch's order.

Covers: a sampler that leaves out what was given out. Does not cover: knowing what that was (progress.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Any


class Rest:
    """A sampler without what was given out of it; from the next pass on it is whole."""

    def __init__(self, whole: Any, first: int, beyond: Collection[int] = ()) -> None:
        self._whole = whole
        self._first, self._beyond = first, frozenset(beyond)
        self._begun = False
        self._latest: _RestIterator | None = None

    def __iter__(self) -> Iterator[Any]:
        if self._begun:
            self._first, self._beyond = 0, frozenset()
            return iter(self._whole)
        # torch asks twice where there are workers, before and after it draws their seeds. A sampler that draws at once
        # must be asked as often.
        self._latest = _RestIterator(iter(self._whole), self._first, self._beyond)
        return self._latest

    def __len__(self) -> int:
        whole = len(self._whole)
        return max(0, whole - self._first - sum(number < whole for number in self._beyond))

    def begin(self) -> None:
        """Draw the order now, if that has not happened; who asks from now on gets the whole."""
        self._begun = True
        if self._latest is not None:
            self._latest.prepare()
            self._latest = None


class _RestIterator:
    def __init__(self, order: Iterator[Any], first: int, beyond: frozenset[int]) -> None:
        self._order, self._first, self._beyond = order, first, beyond
        self._at = 0

    def prepare(self) -> None:
        """Leave out the beginning."""
        while self._at < self._first and next(self._order, self) is not self:
            self._at += 1

    def __iter__(self) -> _RestIterator:
        return self

    def __next__(self) -> Any:
        self.prepare()
        while self._at in self._beyond:
            next(self._order)
            self._at += 1
        self._at += 1
        return next(self._order)
