"""A job that hangs on a full /dev/shm.

Covers: noticing that nothing was written and no CPU time used for a while, and that shared memory is why.
Does not cover: slow jobs, deadlocks of other kinds, ending it (watched.py).

A worker of torch ≥ 2.10 that is refused shared memory inside its queue's feeder thread prints a traceback, drops the
batch and continues; the trainer waits for that batch for ever. No process dies, so no status ever tells. A healthy
job may wait for minutes as well: for a peer, a queue, a disk. So it counts as hanging only while all of this is so:
it has a loader whose workers live, its own processes hold about half of /dev/shm or more, or have a segment open that
got no pages and is larger than what is free, and a refusal stands near the end of what it wrote.
(What is left in /dev/shm after a dropped batch is what fitted: 63 to 99 % were measured
with batches of 9 to 40 MB in 64 MB.)
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from legroom.model.death import Level, LogFacts
from legroom.probe.host import Host
from legroom.probe.shm_segments import SHM, Segments
from legroom.rescue.log_signs import WINDOW

_HOLDS = 0.45  # of /dev/shm, by the job's own processes
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


def held_shm(host: Host, pids: Sequence[int]) -> int | None:
    """Bytes of /dev/shm that these processes map or have open; None where that cannot be read."""
    if not pids:
        return 0
    segments = Segments.of(host, pids[0])
    inodes: set[int] = set()
    for pid in pids:
        held = segments.of_process(pid)
        if held is None:
            return None
        inodes |= held.inodes
    return segments.total(inodes)


def refused_shm(host: Host, pids: Sequence[int]) -> int:
    """The largest segment of /dev/shm that these processes have open and that got no pages: a refused request.

    torch sets the size of the file before it asks for its pages, and keeps a file that was refused.
    """
    most = 0
    for pid in pids:
        folder = host.path(f"/proc/{pid}/fd")
        try:
            names = os.listdir(folder)
        except OSError:  # it has ended, or may not be read: no evidence
            continue
        for name in names:
            # The link is read before the file is asked: asking a dead network filesystem would hang.
            if (host.link(f"/proc/{pid}/fd/{name}") or "").startswith(SHM + "/"):
                try:
                    found = os.stat(folder / name)
                except OSError:
                    continue
                most = max(most, found.st_size - found.st_blocks * 512)
    return most


def hangs_on_shm(
    level: Level | None, held: int | None, log: LogFacts, *, loader: bool, refused: int = 0
) -> bool:
    """Whether a job that does nothing waits for a batch that /dev/shm had no room for. Pure.

    ``refused``: bytes of the job's own request that got no pages. One that is larger than what is free now cannot be
    met, however little the job holds.
    """
    if not loader or level is None or held is None:
        return False
    if held < level.size * _HOLDS and refused <= level.size - level.used:
        return False
    return any(sign.code == "shm" and sign.number <= WINDOW for sign in log.signs)
