"""Who is there, kept from look to look: only newcomers are read whole.

Covers: a cheap list of all processes for watching at 1 Hz, and one process's status file read again.
Does not cover: choosing among them (monitor), what each holds beyond its status (process.py).

Listing /proc is one call; reading two small files of every process is what costs. A process that is known is read
again only in its turn: its command changes when it calls exec, its parent when that one dies, and its number
may have passed to somebody else. The young ones are read again soon, because a fork is often followed by an exec.
(Keeping every status file open would save 4 of the 40 µs a reading takes, and cost a descriptor each: not done.)
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from legroom.model import Process
from legroom.probe.host import Host
from legroom.probe.process import is_ending, parse_status, process_at

_IN_TURN = 8  # known processes read again at every look
_YOUNG = 3  # looks after its first during which a process is read every time


@dataclass
class Roster:
    """All processes of a host, as last read."""

    host: Host
    known: dict[int, Process | None] = field(default_factory=dict)  # None: a kernel thread or a zombie
    _ages: dict[int, int] = field(default_factory=dict)  # looks, of the young ones
    _turn: int = 0  # the pid after which the next turn begins

    def look(self) -> Mapping[int, Process]:
        """Everybody there now, by pid."""
        there = {int(name) for name in self.host.names("/proc") if name.isascii() and name.isdecimal()}
        for pid in self.known.keys() - there:
            del self.known[pid]
            self._ages.pop(pid, None)
        for pid in there - self.known.keys():
            self._ages[pid] = 0
        for pid in [*self._ages, *self._next_in_turn()]:
            self.known[pid] = process_at(self.host, pid)
        self._ages = {pid: looks + 1 for pid, looks in self._ages.items() if looks < _YOUNG}
        return {pid: found for pid, found in sorted(self.known.items()) if found is not None}

    def still_there(self, pid: int) -> bool:
        """Whether that process has not ended; one that has is left out of the next look."""
        found = None if is_ending(self.host, pid) else process_at(self.host, pid)
        if pid in self.known:
            self.known[pid] = found
        return found is not None

    def _next_in_turn(self) -> list[int]:
        pids = sorted(self.known)
        start = bisect_right(pids, self._turn)
        chosen = (pids[start:] or pids)[:_IN_TURN]
        self._turn = chosen[-1] if chosen else 0
        return chosen


def status_of(host: Host, process: Process) -> Process | None:
    """The process with the figures of its status file as they are now; None where it has ended."""
    found = parse_status(host.text(f"/proc/{process.pid}/status") or "", process.pid)
    return None if found is None else replace(found, command=process.command)


def pss_of(host: Host, pid: int) -> int | None:
    """Its proportional share of what it maps. The kernel walks its page tables for it: ask seldom."""
    return host.table(f"/proc/{pid}/smaps_rollup").get("Pss")
