"""Readings that cost more than they may at every sample.

Covers: when such a reading is due again. Does not cover: what is read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Ration:
    """A share of the time that a reading may take: one that took 5 ms at a share of 0.5 % is due again in 1 s."""

    share: float
    least_gap: float = 0.0
    due_at: float = 0.0

    def due(self, clock: float) -> bool:
        """Whether it may be taken now."""
        return clock >= self.due_at

    def spent(self, clock: float, cost: float) -> None:
        """It was taken, and took that many seconds."""
        self.due_at = clock + max(self.least_gap, cost / self.share)
