"""Which part of an epoch's order each rank gets, batch by batch.

Covers: dealing an order out to ranks, and going on in the middle with another number of ranks.
Does not cover: the order itself (order.py), who is which rank (ranks.py).

A step hands every rank one batch: rank r of W takes the r-th of the next W × batch_size places. So after any number
of steps a prefix of the order has been given out, its length says all there is to say about the progress, and any
other number of ranks (or batch size) can go on from there without leaving out or repeating a row. What is left for the
last step is split evenly:

    pad    every rank gets the same, rows from the start of the order filling up (as torch's DistributedSampler)
    drop   every rank gets the same, fewer than W rows are left out
    all    every row once; ranks may differ by one row, and so by one batch
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

Uneven = Literal["pad", "drop", "all"]
UNEVEN: tuple[Uneven, ...] = get_args(Uneven)


class Step(NamedTuple):
    """One rank's part of one step: places in the order (beyond its end they begin again), and what follows."""

    first: int
    last: int
    after: int  # the position once every rank has had its part


@dataclass(frozen=True, slots=True)
class Share:
    """What one rank gets of an order of so many rows."""

    rows: int
    batch_size: int
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1
    uneven: Uneven = "pad"

    def step(self, position: int) -> Step | None:
        """The batch that follows when ``position`` places have been given out; None: nothing is left for this rank."""
        left = self.rows - position
        if left >= self.batch_size * self.world_size:
            first = position + self.rank * self.batch_size
            return Step(first, first + self.batch_size, position + self.batch_size * self.world_size)
        first, last = self._tail(left)
        if first == last or (self.drop_last and last - first < self.batch_size):
            return None
        return Step(position + first, position + last, self.rows)

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
