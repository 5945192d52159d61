"""Who reads which rows: the order of an epoch, cut into shards without overlap or loss.

Covers: pure arithmetic on row counts; shuffling whole groups by (seed, epoch); ranks and their workers.
Does not cover: reading, and the shuffling of rows within a shard (stream/flow.py).

All groups laid end to end in the epoch's order are one line of rows. A rank gets one stretch of it, so that at most
two of its groups are shared with a neighbour; a worker gets a stretch of its rank's, cut at multiples of the batch
size, so that only the rank's last batch can be short, whatever the number of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from legroom.loader.rows.share import Uneven


@dataclass(frozen=True, slots=True)
class Piece:
    """Some consecutive rows of one group."""

    group: int  # its number in the catalog
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """One reader among all: a worker of a rank."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1


def epoch_order(groups: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The groups in the order in which the epoch reads them."""
    if not shuffle:
        return list(range(groups))
    from legroom.loader.rows.order import permutation

    order: list[int] = permutation(groups, seed, epoch).tolist()
    return order


def rank_stretch(rows: int, rank: int, world_size: int, uneven: Uneven) -> tuple[int, int]:
    """The rank's stretch of the line; ``pad`` may run past its end, which goes on from the beginning."""
    if uneven == "all":
        return rows * rank // world_size, rows * (rank + 1) // world_size
    each = rows // world_size if uneven == "drop" else -(-rows // world_size)
    return rank * each, (rank + 1) * each


def worker_stretch(
    start: int, stop: int, worker: int, workers: int, batch_size: int, drop_last: bool
) -> tuple[int, int]:
    """The worker's part of its rank's stretch, in whole batches."""
    batches = batch_count(stop - start, batch_size, drop_last)
    first, end = batches * worker // workers, batches * (worker + 1) // workers
    return start + first * batch_size, min(stop, start + end * batch_size)


def batch_count(rows: int, batch_size: int, drop_last: bool) -> int:
    """How many batches these rows make."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def pieces(sizes: Sequence[int], order: Sequence[int], start: int, stop: int) -> list[Piece]:
    """The stretch [start, stop) of the line as pieces of groups; beyond the end it begins again."""
    ends = list(accumulate((sizes[group] for group in order), initial=0))
    total = ends[-1]
    found: list[Piece] = []
    while start < stop and total:
        at = start % total
        place = bisect_right(ends, at) - 1
        group, first = order[place], at - ends[place]
        size = min(sizes[group] - first, stop - start)
        found.append(Piece(group, first, first + size))
        start += size
    return found
