"""The scale of time under a chart. Covers: where a moment lies, round ticks, which labels fit. Pure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from legroom.units import format_duration

_STEPS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800)
_MOST_TICKS = 8


@dataclass(frozen=True, slots=True)
class Scale:
    """From the first moment at ``left`` to the last at ``right``."""

    first: float
    last: float
    left: float
    right: float

    def x(self, when: float) -> float:
        """Where that moment lies; one outside lies on the edge."""
        part = (when - self.first) / (self.last - self.first)
        return self.left + (self.right - self.left) * min(1.0, max(0.0, part))

    def words(self, when: float) -> str:
        """The moment as time since the first."""
        return format_duration(max(0.0, when - self.first)) if when > self.first else "0 s"

    def ticks(self) -> list[tuple[float, str]]:
        """Round moments, at most eight, and their words."""
        span = self.last - self.first
        step = next((step for step in _STEPS if span / step <= _MOST_TICKS), span / _MOST_TICKS)
        count = int(span / step)
        return [
            (self.first + step * number, self.words(self.first + step * number))
            for number in range(count + 1)
        ]


def scale_of(first: float, last: float, left: float, right: float) -> Scale:
    """A scale of a second at least: one sample has a place too."""
    return Scale(first, max(last, first + 1.0), left, right)


def clear_of(right: float) -> Callable[[float, float], bool]:
    """Asked from left to right whether a label of that width at that place overlaps none that was granted."""
    taken = float("-inf")

    def free(x: float, width: float) -> bool:
        nonlocal taken
        if x < taken or x + width > right:
            return False
        taken = x + width
        return True

    return free
