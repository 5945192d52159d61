"""Alarms while a supervised job lives: what it holds and where that is going, by the rules of `legroom watch`.

Covers: making a sample of each slow reading and asking the rules. Does not cover: taking readings (readings.py), the
rules and how long an alarm stands (monitor), telling people (watched.py).

The monitor's own sampler lists every process of the machine, disks and page tables; a supervisor has read the pools
already and knows its job's processes: 0.6 ms a look instead of 4.3 for one process among eighty.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace

from legroom.model import Alarm, MemoryEvents, Pool, ProcessRow, Sample
from legroom.model.death import Level, Reading
from legroom.monitor.alarms import AlarmTracker
from legroom.probe.memory import SwapCounters, pressure, read_swap_counters
from legroom.probe.process import process_at
from legroom.rescue.readings import Readings

_MOST_KEPT = 100
_LONGEST_COMMAND = 160


@dataclass
class AlarmWatch:
    """The alarms of one attempt."""

    readings: Readings
    raised: deque[Alarm] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    _alarms: AlarmTracker = field(default_factory=AlarmTracker)
    _born: dict[int, float | None] = field(default_factory=dict)
    _swap: SwapCounters | None = None

    def look(self, reading: Reading) -> tuple[Alarm, ...]:
        """Those that begin, or turn critical, with this reading; ``since`` says when, from the job's start."""
        moment = self._alarms.add(self._sample(reading))
        begun = tuple(replace(alarm, since=reading.when) for alarm in moment.begun)
        self.raised.extend(begun)
        return begun

    def _sample(self, reading: Reading) -> Sample:
        readings = self.readings
        rows = self._rows(reading)
        inward, outward = self._swap_rates()
        _, source = readings.home.counters(readings.host)
        return Sample(
            when=reading.when,
            clock=reading.when,
            interval=readings.slow_pause,
            watched="",
            # Descriptors are no bytes: the rules take them from their process.
            pools=tuple(_pool(name, level) for name, level in reading.levels.items() if name != "fds"),
            processes=rows,
            swap_in=inward,
            swap_out=outward,
            pressure=pressure(readings.host, str(rows[0].pid) if rows else "self"),
            events=MemoryEvents(reading.oom_kills, None, None, "cgroup", source),
        )

    def _rows(self, reading: Reading) -> tuple[ProcessRow, ...]:
        readings, first = self.readings, not self._born
        fds = reading.levels.get("fds")
        rows = []
        for pid in readings.present:
            found = process_at(readings.host, pid)
            if found is None:
                continue
            nearest = fds if pid == readings.nearest else None
            row = ProcessRow(
                pid,
                found.parent,
                found.command[:_LONGEST_COMMAND],
                rss=found.rss,
                rss_shmem=found.rss_shmem,
                swap=found.swap,
                fds=nearest.used if nearest else None,
                fd_limit=nearest.size if nearest else None,
                gpu=readings.cards.held.get(pid),
                born=self._born.setdefault(pid, None if first else reading.when),
            )
            rows.append(row)
        self._born = {row.pid: row.born for row in rows}
        return tuple(rows)

    def _swap_rates(self) -> tuple[float | None, float | None]:
        """Bytes a second since the last look, in and out, of the machine."""
        before, now = self._swap, read_swap_counters(self.readings.host)
        self._swap = now
        if before is None or now.when <= before.when:
            return None, None
        pairs = ((before.swapped_in, now.swapped_in), (before.swapped_out, now.swapped_out))
        inward, outward = (
            None if old is None or new is None else max(0, new - old) / (now.when - before.when)
            for old, new in pairs
        )
        return inward, outward


def _pool(name: str, level: Level) -> Pool:
    return Pool(name, level.size, level.used, max(0, level.size - level.used), "")
