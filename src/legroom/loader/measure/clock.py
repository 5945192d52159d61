"""A clock that separates computing, waiting and time on the run queue.

CPU time is what a core must spend. Waiting is what any number of workers can do at once. Time on the run queue, while
other processes had the core, belongs to the machine and not to the work.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

_SCHEDSTAT = "/proc/thread-self/schedstat"


@dataclass(frozen=True, slots=True)
class Clock:
    """A point in time, or the difference between two."""

    wall: float
    cpu: float  # of every thread of this process
    queued: float  # time on the run queue while other threads had the core

    @classmethod
    def now(cls) -> Clock:
        try:
            with open(_SCHEDSTAT, "rb") as file:
                queued = int(file.read().split()[1]) / 1e9
        except (
            OSError,
            IndexError,
            ValueError,
        ):  # not Linux, or a kernel without it: it then counts as waiting
            queued = 0.0
        return cls(time.perf_counter(), time.process_time(), queued)

    def since(self, start: Clock) -> Clock:
        return Clock(self.wall - start.wall, self.cpu - start.cpu, self.queued - start.queued)

    @property
    def undisturbed(self) -> float:
        """The time it would have taken on a free core."""
        return max(0.0, self.wall - self.queued)
