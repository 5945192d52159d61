"""Reads now and then how much forked workers have copied of their parent's memory by reading it.

Takes a share of the time. What they copied by writing is not counted: they reuse memory that the parent had freed.
Workers of one parent read the same dataset, so at most two of each parent are read.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from legroom.probe.copy_on_write import CopyReader
from legroom.probe.host import Host
from legroom.records import ProcessRow

_MOST_OF_A_PARENT = 2
_LEAST_GAP = 5.0  # seconds between two readings of a worker
_MUCH = 32 << 20  # bytes that a worker has copied


@dataclass
class WorkerCopies:
    """Keeps the first reading of each worker, and adds what it has copied since then to its row."""

    host: Host
    share: float = 0.003  # of one core, for all readings
    _readers: dict[int, CopyReader] = field(default_factory=dict)  # by parent
    _chosen: dict[int, int] = field(default_factory=dict)  # workers that are read, and their parents
    _due: float = 0.0
    unread: str | None = None  # why it is unknown whether workers copy by reading, although they copy much

    def update(self, rows: Iterable[ProcessRow], clock: float) -> dict[int, ProcessRow]:
        """The rows of workers that were read now, by pid."""
        by_pid = {row.pid: row for row in rows}
        for pid in [pid for pid, parent in self._chosen.items() if by_pid.get(pid) is None or parent not in by_pid]:
            reader = self._readers.get(self._chosen.pop(pid))
            if reader is not None:
                reader.forget(pid)
        self._readers = {parent: reader for parent, reader in self._readers.items() if parent in by_pid}
        if clock < self._due or self.host.platform != "linux":
            return {}
        self._choose(by_pid)
        began = time.thread_time()
        found = {}
        for parent in set(self._chosen.values()):
            reader = self._readers.setdefault(parent, CopyReader(self.host, parent, compare=True))
            for one in reader.read([pid for pid, its in self._chosen.items() if its == parent], clock):
                if one.only_read is None and (one.copied or 0) >= _MUCH:
                    self.unread = one.reason
                elif one.only_read is not None:
                    found[one.pid] = replace(by_pid[one.pid], copied=one.only_read, copied_at=clock)
        self._due = clock + max(_LEAST_GAP, (time.thread_time() - began) / self.share)
        return found

    def _choose(self, rows: dict[int, ProcessRow]) -> None:
        """Add workers: processes that were forked from a watched one, which have its command line."""
        counts: dict[int, int] = {}
        for parent in self._chosen.values():
            counts[parent] = counts.get(parent, 0) + 1
        for pid, row in rows.items():
            above = rows.get(row.parent)
            if above is None or pid in self._chosen or row.command != above.command:
                continue
            if counts.get(above.pid, 0) < _MOST_OF_A_PARENT:
                self._chosen[pid] = above.pid
                counts[above.pid] = counts.get(above.pid, 0) + 1
