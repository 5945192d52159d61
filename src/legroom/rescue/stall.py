"""A job that stands still on a full /dev/shm.

Covers: noticing that nothing was written and no CPU time used for a while, and that shared memory is why.
Does not cover: slow jobs, deadlocks of other kinds, ending it (supervisor.py).

A worker of torch ≥ 2.10 that is refused shared memory inside its queue's feeder thread prints a traceback, drops the
batch and goes on; the trainer waits for that batch for ever. No process dies, so no status ever tells.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from legroom.probe.host import Host

_IDLE = 0.02  # of one core: polling loops use less, anything that works uses more
_TICKS = 100


@dataclass
class StallWatch:
    """When it last did something."""

    patience: float
    _since: float | None = None
    _cpu: float = 0.0
    _written: int = -1

    def idle_for(self, now: float, cpu: float, written: int) -> float:
        """Seconds since it last wrote or worked, by the CPU time and the bytes it has by now."""
        span = 0.0 if self._since is None else now - self._since
        worked = cpu - self._cpu > max(0.05, span * _IDLE)
        # CPU time falls when a worker ends: that, too, is something that happened.
        if self._since is None or worked or cpu < self._cpu or written != self._written:
            self._since, self._cpu, self._written = now, cpu, written
            return 0.0
        return span

    def stalled(self, now: float, cpu: float, written: int) -> bool:
        """Whether it has stood still for longer than patience allows."""
        return self.patience > 0 and self.idle_for(now, cpu, written) >= self.patience


def cpu_seconds(host: Host, pids: Sequence[int]) -> float:
    """CPU time that these processes have used."""
    total = 0
    for pid in pids:
        fields = (host.text(f"/proc/{pid}/stat") or "").rpartition(")")[2].split()
        if len(fields) > 12:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS
