"""The memory of a loader's workers: the least with which all of them go on, and how many fit.

Covers: one worker's parts, the sum for several, what to keep free beside it, smaller settings that fit. Does not cover:
measuring a worker (loader), batches that are in flight for speed alone (predict.py).

Pure. While it makes a batch a worker holds the samples, whatever its collate function makes of them, and the slot that
the batch travels in. One more batch is in the hands of the training. Everything beyond that is comfort.
"""

from __future__ import annotations

from dataclasses import dataclass

SPARE = (
    16 << 20
)  # page tables, stacks, buffers of pipes: the cgroup counts them, and nobody can say them beforehand


@dataclass(frozen=True, slots=True)
class Each:
    """What one worker takes, in bytes."""

    own: int  # the process, before it draws a sample
    making: int  # more private memory at its height, while a batch is made
    batch: int  # in the slot

    @property
    def all(self) -> int:
        """Until its first batch is sent."""
        return self.own + self.making + self.batch


def least(each: Each, workers: int) -> int:
    """What so many workers take, each with one batch, and the one that the training looks at."""
    return workers * each.all + each.batch


def spare(need: int) -> int:
    """What must stay free beside a need: samples are not all alike, and an allocator keeps some of what is freed."""
    return SPARE + need // 8


def fits(need: int, free: int) -> bool:
    """Whether a need can be met and nobody is killed for it."""
    return need + spare(need) <= free


def most_workers(each: Each, free: int, asked: int) -> int:
    """How many workers fit, up to those asked for; 0 where none does."""
    return next((count for count in range(asked, 0, -1) if fits(least(each, count), free)), 0)


def most_samples(each: Each, free: int, workers: int, samples: int) -> int:
    """The largest batch that fits at these workers, below ``samples``, whose batch was measured; 0 where none does."""
    low, high = 0, samples  # low fits, or is no batch at all; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        smaller = Each(each.own, -(-each.making * middle // samples), -(-each.batch * middle // samples))
        if fits(least(smaller, workers), free):
            low = middle
        else:
            high = middle
    return low
