"""Taking samples, cheaply enough to do so every second for hundreds of processes.

Covers: the watched processes' status files at every sample; PSS and descriptors in turns, within a ration of the
time; the pools; what scripts say of themselves. Does not cover: when the next sample is due (stream.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from legroom.errors import LegroomError
from legroom.model import EntryRow, Gpus, Memory, Pool, Pressure, Process, ProcessRow, Said, Sample
from legroom.monitor.process_selection import ProcessSelection
from legroom.probe.filesystem import disk_pool, disks
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host import Host
from legroom.probe.memory import (
    SwapCounters,
    events_of,
    memory,
    pressure,
    ram_pool,
    read_swap_counters,
    swap,
    swap_pool,
)
from legroom.probe.nvml import NvmlSession
from legroom.probe.process import ProcessTable, open_files, parse_limits, pss_of, status_of
from legroom.probe.shm import shm_space
from legroom.probe.shm_segments import SHM, shm_mount
from legroom.words import say

LONGEST_COMMAND = 160  # characters kept of a command line
_DEEP_SHARE = 0.004  # of the time, for PSS and descriptors of all processes together
_ENTRIES_SHARE = 0.001
_ATTEMPTS = 3  # at a sample while the process whose cgroup counts is dying


class Sampler:
    """What is kept from one sample to the next."""

    def __init__(
        self,
        targets: ProcessSelection,
        *,
        host: Host | None = None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        said: Callable[[float, list[int]], Said] | None = None,
        entries: Callable[[], tuple[EntryRow, ...] | None] | None = None,
        table: ProcessTable | None = None,
    ) -> None:
        self.host = host or Host()
        self.targets = targets
        self.interval = interval
        self._clock = clock
        self._began = clock()
        self._said = said
        self._entries = entries
        self._table = table or ProcessTable(self.host)
        self._pools = PoolReader(self.host)
        self._rows: dict[int, ProcessRow] = {}
        self._begun = False
        self._seen: PoolReadings | None = None  # the last one with a watched process in it
        self._deep = RateLimit(_DEEP_SHARE)
        self._turn = 0  # the pid after which the next deep look begins
        self._known_entries: tuple[EntryRow, ...] | None = None
        self._entries_ration = RateLimit(_ENTRIES_SHARE, least_gap=10.0)

    def take(self) -> Sample | None:
        """The next sample; None once everything that was watched has ended and nothing can come.

        The first sample after the last watched process ended has the pools as they were, and the counters of that
        process's cgroup as they are now: an OOM kill is counted there.
        """
        began = time.thread_time()
        clock = self._clock() - self._began
        seen, scope = self._seen, self.targets.scope
        everybody, pids, look = self._look(clock)
        if look is None and seen is None:
            return None
        parted = seen is not None and scope != "self" and int(scope) not in pids
        self._seen = look if pids else None
        if look is None or (parted and not pids):
            assert seen is not None
            look = replace(seen, swap_in=None, swap_out=None, pressure=())
        events = events_of(self.host, seen.ram) if parted and seen is not None else look.ram.events
        held: dict[int, int] = {}
        for card in look.cards.cards:
            for user in card.processes or ():
                if user.used is not None and user.command is not None:
                    held[user.pid] = held.get(user.pid, 0) + user.used
        rows = {pid: self._row(everybody[pid], held.get(pid), clock) for pid in pids}
        self._rows = {pid: row for pid, row in rows.items() if row is not None}
        self._begun = True
        self._look_deeper(clock)
        notes = []
        if self.host.platform != "linux":
            notes.append(say("processes cannot be read on {platform}", platform=self.host.platform))
        return Sample(
            when=self.host.now,
            clock=clock,
            interval=self.interval,
            watched=self.targets.words,
            pools=look.pools,
            processes=tuple(self._rows.values()),
            swap_in=look.swap_in,
            swap_out=look.swap_out,
            pressure=look.pressure,
            events=events,
            said=self._said(clock, pids) if self._said else Said(),
            entries=self._look_at_entries(clock),
            gpu_at=look.gpu_at,
            cost=time.thread_time() - began,
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Let go of what is held between samples."""
        self._pools.close()

    def _look(self, clock: float) -> tuple[Mapping[int, Process], list[int], PoolReadings | None]:
        """Everybody, the watched among them, and the pools as one of these sees them.

        No pools where all have ended and none can come.
        """
        for _ in range(_ATTEMPTS):
            everybody = self._table.refresh()
            pids = self.targets.choose(everybody)
            if not pids and self.targets.ends:
                return everybody, pids, None
            scope = self.targets.scope
            look = self._pools.look(clock, scope)
            # A process that dies while it is read is in no cgroup, and shows the root's: then choose again.
            if scope == "self" or self._table.is_running(int(scope)):
                return everybody, pids, look
        return everybody, pids, self._pools.look(clock, "self")  # they end faster than they can be read

    def _row(self, process: Process, gpu: int | None, clock: float) -> ProcessRow | None:
        now = status_of(self.host, process)
        if now is None:
            return None
        command = process.command[:LONGEST_COMMAND]
        old = self._rows.get(process.pid)
        if old is None or old.command != command:
            old = ProcessRow(process.pid, now.parent, command, born=clock if self._begun else None)
        new = replace(old, parent=now.parent, rss=now.rss, rss_shmem=now.rss_shmem, swap=now.swap, gpu=gpu)
        return old if new == old else new  # an idle process is one object in all of history

    def _look_deeper(self, clock: float) -> None:
        """PSS and descriptors of as many processes, in turn, as the ration pays for; newcomers first."""
        if not self._deep.due(clock):
            return
        budget = _DEEP_SHARE * self.interval
        began = time.perf_counter()
        for pid in self._order():
            row = self._rows[pid]
            limit = row.fd_limit
            if limit is None:
                limit = parse_limits(self.host.text(f"/proc/{pid}/limits") or "").get("Max open files")
            self._rows[pid] = replace(
                row, pss=pss_of(self.host, pid), pss_at=clock, fds=open_files(self.host, pid), fd_limit=limit
            )
            self._turn = pid
            if time.perf_counter() - began >= budget:
                break
        self._deep.spent(clock, time.perf_counter() - began)

    def _order(self) -> list[int]:
        new = [pid for pid, row in self._rows.items() if row.pss_at is None]
        old = [pid for pid, row in self._rows.items() if row.pss_at is not None]
        return new + [pid for pid in old if pid > self._turn] + [pid for pid in old if pid <= self._turn]

    def _look_at_entries(self, clock: float) -> tuple[EntryRow, ...] | None:
        if self._entries is not None and self._entries_ration.due(clock):
            began = time.perf_counter()
            self._known_entries = self._entries()
            self._entries_ration.spent(clock, time.perf_counter() - began)
        return self._known_entries


_SPARING = 0.003  # of the time: cards, disks


@dataclass(frozen=True, slots=True)
class PoolReadings:
    """One reading of all pools."""

    pools: tuple[Pool, ...]
    swap_in: float | None
    swap_out: float | None
    pressure: tuple[Pressure, ...]
    ram: Memory  # with the counters of the cgroup
    cards: Gpus
    gpu_at: float


@dataclass
class PoolReader:
    """What is kept from one reading to the next."""

    host: Host
    _counters: SwapCounters = field(
        default_factory=lambda: SwapCounters(0.0, None, None)
    )  # none yet: no rates
    _disk: Pool | None = None
    _cards: Gpus | None = None
    _gpu_at: float = 0.0
    _shm_path: str | None = None
    _scope: str = ""
    _disk_ration: RateLimit = field(default_factory=lambda: RateLimit(_SPARING, least_gap=5.0))
    _gpu_ration: RateLimit = field(default_factory=lambda: RateLimit(_SPARING))
    _nvml: NvmlSession = field(default_factory=NvmlSession)

    def look(self, clock: float, scope: str) -> PoolReadings:
        """All pools from the point of view of process ``scope``."""
        ram = memory(self.host, scope)
        swapped = swap(self.host, ram, self._counters)
        self._counters = read_swap_counters(self.host)
        cards = self._look_at_cards(clock)
        return PoolReadings(
            pools=(
                self._shm(scope),
                ram_pool(ram),
                swap_pool(swapped),
                self._look_at_disk(clock),
                *gpu_pools(cards),
            ),
            swap_in=swapped.in_rate,
            swap_out=swapped.out_rate,
            pressure=pressure(self.host, scope),
            ram=ram,
            cards=cards,
            gpu_at=self._gpu_at,
        )

    def close(self) -> None:
        """Let go of the driver."""
        self._nvml.close()

    def _shm(self, scope: str) -> Pool:
        if self.host.platform != "linux":
            why = say("{platform} has no /dev/shm", platform=self.host.platform)
            return Pool("shm", None, None, None, SHM, why)
        if self._shm_path is None or scope != self._scope:
            self._scope, self._shm_path = scope, self._shm_of(scope)
        size, used, free, reason = shm_space(self.host, self._shm_path)
        return Pool("shm", size, used, free, say("statvfs({path})", path=self._shm_path), reason)

    def _shm_of(self, scope: str) -> str:
        """The /dev/shm that process sees: a container's is another one than ours."""
        namespace = self.host.link(f"/proc/{scope}/ns/mnt")
        if namespace is not None and namespace != self.host.link("/proc/self/ns/mnt"):
            theirs = f"/proc/{scope}/root{shm_mount(self.host, scope)[0]}"
            if self.host.disk_space(theirs) is not None:  # else its root may not be entered
                return theirs
        return shm_mount(self.host)[0]

    def _look_at_disk(self, clock: float) -> Pool:
        if self._disk is None or self._disk_ration.due(clock):
            began = time.perf_counter()
            self._disk = disk_pool(disks(self.host))
            self._disk_ration.spent(clock, time.perf_counter() - began)
        return self._disk

    def _look_at_cards(self, clock: float) -> Gpus:
        if self._cards is None or self._gpu_ration.due(clock):
            began = time.perf_counter()
            self._cards = gpus(self.host)
            self._gpu_at = clock
            if self._cards.cards and self.host.live:
                self._nvml.open()
            self._gpu_ration.spent(clock, time.perf_counter() - began)
        return self._cards


def cache_entries() -> tuple[EntryRow, ...] | None:
    """Every entry of every store; None where the cache cannot be looked into."""
    from legroom.cache.catalog import entries  # brings in numpy: not before somebody asks

    try:
        found = entries()
    except (LegroomError, OSError):
        return None
    return tuple(
        EntryRow(
            entry.key or "",
            entry.sources[0] if entry.sources else "",
            entry.backing,
            entry.bytes,
            entry.in_use,
        )
        for entry in found
    )


@dataclass
class RateLimit:
    """A share of the time that a reading may take: one that took 5 ms at a share of 0.5 % is due again in 1 s."""

    share: float
    least_gap: float = 0.0
    due_at: float = 0.0

    def due(self, clock: float) -> bool:
        """Whether it may be taken now."""
        return clock >= self.due_at

    def spent(self, clock: float, cost: float) -> None:
        """It was taken, and took that many seconds."""
        self.due_at = clock + max(self.least_gap, cost / self.share)
