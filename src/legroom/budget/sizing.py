"""Three sizes for /dev/shm that follow from a need, and what caps them.

Covers: minimum, recommended, conservative; the cap that memory puts on all three. Does not cover: the need itself
(predict.py), how a size is set (remedy.py, emit.py).

Pure. Filling /dev/shm up to its size must never meet the memory limit first: that would turn a clean error into an
OOM kill (docs/evidence/tmpfs-and-cgroup.md). So advice stays below the limit less what the processes themselves need.
"""

from __future__ import annotations

from legroom.budget.settings import PAGE
from legroom.model import ShmSizes
from legroom.units import format_size
from legroom.words import say

FLOOR = 512 << 20  # no recommendation below it: a power of two costs nothing until it is used


def power_of_two(amount: int) -> int:
    """The next power of two at or above it; at least one page."""
    return max(PAGE, 1 << max(0, amount - 1).bit_length())


def advise(need: int, *, memory: int | None = None, processes: int = 0, bound: str = "") -> ShmSizes:
    """The three sizes for a need; ``memory`` is the limit behind it, ``processes`` what they take besides.

    ``bound`` names the limit in words. Nothing is capped where the limit is unknown.
    """
    minimum = power_of_two(need)
    recommended = max(FLOOR, power_of_two(2 * need))
    sizes = ShmSizes(minimum, recommended, 2 * recommended)
    if memory is None:
        return sizes
    room = max(0, memory - processes) // PAGE * PAGE
    if sizes.conservative <= room:
        return sizes
    why = say(
        "{bound} {memory} less {processes} for the processes" if processes else "{bound} {memory}",
        bound=bound or say("the memory limit of"), memory=format_size(memory), processes=format_size(processes),
    )  # fmt: skip
    return ShmSizes(min(minimum, room), min(recommended, room), min(sizes.conservative, room), why)
