"""RAM against what binds a job, read cheaply again and again.

Covers: finding the tightest limit on the job once in a while, and reading only that in between. Does not cover: what
else there is to know about memory (probe.memory).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.model import CgroupLevel
from legroom.model.death import Level
from legroom.probe.cgroup import Version
from legroom.probe.host import Host
from legroom.probe.memory import level_at, memory

_LOOK_AROUND = 30  # looks after which all levels are read again: limits may be changed under a living job


@dataclass
class RamLevel:
    """The tightest of the limits above a process, or the machine's RAM where none is tighter."""

    host: Host
    _tightest: str | None = None  # the group that has it
    _version: Version | None = None
    _looks: int = 0

    def read(self, pid: str) -> Level | None:
        """How full it is now; None where it cannot be read."""
        if self._looks % _LOOK_AROUND == 0:
            self._look_around(pid)
        self._looks += 1
        if self._tightest is not None and self._version is not None:
            level = level_at(self.host, self._version, self._tightest)
            if level.limit is not None and level.unreclaimable is not None:
                return Level(level.unreclaimable, level.limit)
        info = self.host.table("/proc/meminfo")
        total, available = info.get("MemTotal"), info.get("MemAvailable")
        return None if total is None or available is None else Level(max(0, total - available), total)

    def _look_around(self, pid: str) -> None:
        found = memory(self.host, pid)
        limited = [level for level in found.levels if _binds(level, found.total)]
        tight = min(limited, key=lambda level: level.limit or 0, default=None)
        self._tightest = None if tight is None else tight.path
        self._version = found.cgroup


def _binds(level: CgroupLevel, total: int | None) -> bool:
    return level.limit is not None and (total is None or level.limit < total)
