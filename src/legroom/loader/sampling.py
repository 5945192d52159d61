"""Which rows each rank gets, and in which order: the permutation of an epoch and its division among ranks.

Both are pure functions, so that every rank, and a resumed run with another world size, computes the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Uneven = Literal["pad", "drop", "all"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)


class SampledBatch(NamedTuple):
    """One rank's part of one step: places in the order (beyond its end they begin again), and what follows."""

    first: int
    last: int
    after: int  # the position once every rank has had its part


@dataclass(frozen=True, slots=True)
class RankSampler:
    """What one rank gets of an order of so many rows."""

    rows: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: Uneven = "pad"

    def step(self, position: int) -> SampledBatch | None:
        """The batch that follows when ``position`` places have been given out; None: nothing is left for this rank."""
        left = self.rows - position
        if left >= self.batch_size * self.world_size:
            first = position + self.rank * self.batch_size
            return SampledBatch(first, first + self.batch_size, position + self.batch_size * self.world_size)
        first, last = self._tail(left)
        if first == last or (self.drop_last and last - first < self.batch_size):
            return None
        return SampledBatch(position + first, position + last, self.rows)

    def __len__(self) -> int:
        """The batches of a whole epoch."""
        full, left = divmod(self.rows, self.batch_size * self.world_size)
        return full + (self.step(self.rows - left) is not None)

    def _tail(self, left: int) -> tuple[int, int]:
        """This rank's part of the last places, fewer than a whole step's."""
        each, over = divmod(left, self.world_size)
        if self.uneven == "all":
            first = self.rank * each + min(self.rank, over)
            return first, first + each + (self.rank < over)
        if self.uneven == "pad" and over:
            each += 1
        return self.rank * each, (self.rank + 1) * each


NDArray = np.ndarray[Any, Any]


def permutation(rows: int, seed: int, epoch: int) -> NDArray:
    """The row numbers 0 … rows-1 in the order of that epoch, as int64."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    numbers = np.uint64((1 << max(0, rows - 1).bit_length()) - 1)
    keys &= ~numbers
    keys |= np.arange(rows, dtype=np.uint64)
    keys.sort()
    keys &= numbers
    return keys.view(np.int64)
