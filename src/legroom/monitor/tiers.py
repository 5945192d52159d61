"""A row of things in time that never grows: the recent ones all, the older ones ever more thinly.

Covers: keeping and giving them back in order. Does not cover: what they are.

Each tier holds so many; what falls out of one goes into the next, one in ``thin`` of them, the rest is forgotten.
Six tiers of 256 thinned by four reach four days back at one a second, in 1536 places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

Item = TypeVar("Item")


class Tiers(Generic[Item]):
    """The row; ``older`` may make an item smaller when it leaves the first tier."""

    def __init__(
        self,
        each: int = 256,
        tiers: int = 6,
        thin: int = 4,
        older: Callable[[Item], Item] = lambda item: item,
    ) -> None:
        self._rows: list[deque[Item]] = [deque() for _ in range(tiers)]
        self._fallen = [0] * tiers
        self._each, self._thin, self._older = each, thin, older

    def add(self, item: Item) -> None:
        """Put one at the end."""
        for number, row in enumerate(self._rows):
            row.append(item)
            if len(row) <= self._each:
                return
            item = row.popleft()
            self._fallen[number] += 1
            if self._fallen[number] % self._thin:
                return  # one of those that are forgotten
            if number == 0:
                item = self._older(item)

    def __iter__(self) -> Iterator[Item]:
        for row in reversed(self._rows):
            yield from row

    def __len__(self) -> int:
        return sum(len(row) for row in self._rows)

    def last(self, count: int = 1) -> list[Item]:
        """The newest few, oldest of them first; at most as many as the first tier holds."""
        row = self._rows[0]
        return [row[place] for place in range(max(0, len(row) - count), len(row))]
