"""Takes one sample: memory pools and the watched processes, cheaply enough for every second and hundreds of processes.

Status files are read at every sample. Slower readings (PSS, file descriptors, GPUs, disks, cache entries) take turns
within a fixed share of the time. The interval between samples is kept by watch_loop.py.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

from legroom.messages import say
from legroom.monitor.process_selection import ProcessSelection
from legroom.probe.copy_on_write import WorkerCopies
from legroom.probe.filesystems_and_cgroups import disk_pool, disks
from legroom.probe.gpu_devices import bytes_by_process, gpu_pools, gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.nvml import NvmlSession
from legroom.probe.process_and_limits import ProcessTable, open_files, parse_limits, pss_of, status_of
from legroom.probe.ram_swap_and_pressure import (
    SwapCounters,
    events_of,
    memory,
    pressure,
    ram_pool,
    read_swap_counters,
    swap,
    swap_pool,
)
from legroom.probe.shm import shm_space
from legroom.probe.shm_segments import SHM, shm_mount
from legroom.records.machine import Gpus, Memory, Pool, Pressure, Process
from legroom.records.watch_sample import Annotations, EntryRow, GpuCopyRow, GroupRow, ProcessRow, Sample
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.system.processes_and_threads import start_daemon_thread

Value = TypeVar("Value")
LONGEST_COMMAND = 160  # characters kept of a command line
_DETAIL_SHARE = 0.004  # of the time, for PSS and descriptors of all processes together
_GPU_SHARE = _DISK_SHARE = 0.003
_ENTRIES_SHARE = 0.001
_GROUPS_SHARE = 0.002
_WORTH_READING = 1 / 16  # of RSS: what must have changed for a reading out of turn
_FIRST_PATIENCE, _PATIENCE = 5.0, 0.5  # seconds for a slow reading to end; else a sample has what was read before
_LATE = 10.0  # seconds after which that is not shown any more
_NO_GPUS = Gpus((), None, None, "NVML")
_ATTEMPTS = 3  # to read the pools while the process whose cgroup they belong to is exiting


class Sampler:
    """Takes samples; keeps what the next one reuses."""

    def __init__(
        self,
        selection: ProcessSelection,
        *,
        host: Host | None = None,
        interval: float = 1.0,
        clock: Callable[[], float] = time.monotonic,
        annotations: Callable[[float, list[int]], Annotations] | None = None,
        entries: Callable[[], tuple[EntryRow, ...] | None] | None = None,
        groups: Callable[[], tuple[GroupRow, ...] | None] | None = None,
        gpu_copies: Callable[[], tuple[GpuCopyRow, ...] | None] | None = None,
        table: ProcessTable | None = None,
    ) -> None:
        self.host = host or Host()
        self.selection = selection
        self.interval = interval
        self._clock = clock
        self._start = clock()
        self._annotations = annotations
        self._table = table or ProcessTable(self.host)
        self._pools = PoolReader(self.host)
        self._rows: dict[int, ProcessRow] = {}
        self._first_taken = False
        self._last: PoolReadings | None = None  # the last readings with a watched process alive
        self._detail_limit = RateLimit(_DETAIL_SHARE)
        self._detailed_rss: dict[int, int] = {}  # RSS at the last detailed reading
        self._by_change = True  # whether the next detailed reading is of the process that changed most
        self._copies = WorkerCopies(self.host)
        self._entries = SlowReading(entries, _ENTRIES_SHARE, min_gap=10.0)
        self._groups = SlowReading(groups, _GROUPS_SHARE)
        self._gpu_copies = SlowReading(gpu_copies, _GROUPS_SHARE)
        self._cpu = 0.0  # seconds used by the threads of slow readings

    def take(self) -> Sample | None:
        """Take a sample; None once every watched process has ended and no other can match.

        The first sample after the last watched process ended repeats its pools, with the counters of its cgroup read
        now: an OOM kill is counted there.
        """
        began = time.thread_time()
        clock = self._clock() - self._start
        last, scope = self._last, self.selection.scope
        processes, pids, readings = self._read(clock)
        if readings is None and last is None:
            return None
        scope_ended = last is not None and scope != "self" and int(scope) not in pids
        self._last = readings if pids else None
        if readings is None or (scope_ended and not pids):
            assert last is not None
            readings = replace(last, swap_in=None, swap_out=None, pressure=())
        events = events_of(self.host, last.ram) if scope_ended and last is not None else readings.ram.events
        gpu_bytes = bytes_by_process(readings.gpus)
        rows = {pid: self._row(processes[pid], gpu_bytes.get(pid), clock) for pid in pids}
        self._rows = {pid: row for pid, row in rows.items() if row is not None}
        self._first_taken = True
        self._read_details(clock)
        self._rows |= self._copies.update(self._rows.values(), clock)
        notes = []
        if self.host.platform != "linux":
            notes.append(say("processes cannot be read on {platform}", platform=self.host.platform))
        if self._copies.unread is not None:
            notes.append(say("whether workers copy the dataset is unknown: {why}", why=self._copies.unread))
        return Sample(
            when=self.host.now,
            clock=clock,
            interval=self.interval,
            watched=self.selection.description,
            pools=readings.pools,
            processes=tuple(self._rows.values()),
            swap_in=readings.swap_in,
            swap_out=readings.swap_out,
            pressure=readings.pressure,
            events=events,
            said=self._annotations(clock, pids) if self._annotations else Annotations(),
            entries=self._entries.at(clock),
            groups=self._groups.at(clock),
            gpu_copies=self._gpu_copies.at(clock),
            gpu_at=readings.gpu_at,
            cost=time.thread_time() - began + self._cpu_of_threads(),
            notes=tuple(notes),
        )

    def close(self) -> None:
        """Release the GPU driver."""
        self._pools.close()

    def _cpu_of_threads(self) -> float:
        """CPU seconds that slow readings used since the last sample."""
        before = self._cpu
        self._cpu = sum(one.cpu for one in (self._entries, self._groups, self._gpu_copies, *self._pools.slow))
        return self._cpu - before

    def _read(self, clock: float) -> tuple[Mapping[int, Process], list[int], PoolReadings | None]:
        """All processes, the pids of the watched ones, and the pools as one of these sees them.

        No pools once all have ended and no other can match.
        """
        for _ in range(_ATTEMPTS):
            processes = self._table.refresh()
            pids = self.selection.choose(processes)
            if not pids and self.selection.ends:
                return processes, pids, None
            scope = self.selection.scope
            readings = self._pools.read(clock, scope)
            # A process that exits while it is read has left its cgroup and shows the root's: choose again.
            if scope == "self" or self._table.is_running(int(scope)):
                return processes, pids, readings
        return processes, pids, self._pools.read(clock, "self")  # processes end faster than they can be read

    def _row(self, process: Process, gpu: int | None, clock: float) -> ProcessRow | None:
        now = status_of(self.host, process)
        if now is None:
            return None
        command = process.command[:LONGEST_COMMAND]
        old = self._rows.get(process.pid)
        if old is None or old.command != command:
            old = ProcessRow(process.pid, now.parent, command, born=clock if self._first_taken else None)
        new = replace(
            old,
            parent=now.parent,
            rss=now.rss,
            rss_shmem=now.rss_shmem,
            rss_anon=now.rss_anon,
            rss_file=now.rss_file,
            swap=now.swap,
            gpu=gpu,
        )
        return old if new == old else new  # so that the history holds an idle process once

    def _read_details(self, clock: float) -> None:
        """Read PSS and descriptors of as many processes as the time limit allows.

        CPU time counts: on a busy machine most of a reading is waiting for a core.
        """
        if not self._detail_limit.due(clock):
            return
        allowed = _DETAIL_SHARE * self.interval
        began = time.thread_time()
        self._detailed_rss = {pid: rss for pid, rss in self._detailed_rss.items() if pid in self._rows}
        for pid in self._detail_order():
            row = self._rows[pid]
            limit = row.fd_limit
            if limit is None:
                limit = parse_limits(self.host.text(f"/proc/{pid}/limits") or "").get("Max open files")
            self._rows[pid] = replace(
                row,
                pss=pss_of(self.host, pid),
                pss_at=clock,
                pss_anon=row.rss_anon,
                fds=open_files(self.host, pid),
                fd_limit=limit,
            )
            self._detailed_rss[pid] = row.rss or 0
            if time.thread_time() - began >= allowed:
                break
        self._detail_limit.spent(clock, time.thread_time() - began)

    def _detail_order(self) -> Iterator[int]:
        """The process whose RSS changed most since its reading, then the next in turn, and so on, each once.

        A large process without a reading comes first; a small one that never changes is read too.
        """
        before = {pid: 0 if row.pss_at is None else self._detailed_rss.get(pid, 0) for pid, row in self._rows.items()}
        changed = {pid: abs((row.rss or 0) - before[pid]) for pid, row in self._rows.items()}
        worth = [pid for pid, amount in changed.items() if amount > _WORTH_READING * (self._rows[pid].rss or 0)]
        worth.sort(key=lambda pid: -changed[pid])
        turn = sorted(self._rows, key=lambda pid: -1.0 if (at := self._rows[pid].pss_at) is None else at)
        waiting, done = (iter(turn), iter(worth)), set[int]()
        while len(done) < len(turn):
            pid = next((pid for pid in waiting[self._by_change] if pid not in done), None)
            self._by_change = not self._by_change
            if pid is not None:
                done.add(pid)
                yield pid


def cache_entries() -> tuple[EntryRow, ...]:
    """Every entry of the shared cache."""
    with import_lock:
        from legroom.cache.list_and_verify import entries  # imports numpy

    return tuple(
        EntryRow(
            entry.key or "",
            # Of a frozen object its name; where it has none, what `legroom cache` accepts as its ID.
            entry.sources[0] if entry.sources else str(entry.attributes.get("name") or (entry.key or "")[:12]),
            entry.backing,
            entry.bytes,
            entry.in_use,
        )
        for entry in entries()
    )


@dataclass
class RateLimit:
    """Limits a reading to a share of the time: one that took 5 ms at a share of 0.5 % is due again in 1 s."""

    share: float
    min_gap: float = 0.0  # seconds
    due_at: float = 0.0

    def due(self, clock: float) -> bool:
        """Whether it may be taken now."""
        return clock >= self.due_at

    def spent(self, clock: float, cost: float) -> None:
        """Record that it was taken at ``clock`` and took ``cost`` seconds."""
        self.due_at = clock + max(self.min_gap, cost / self.share)


class SlowReading(Generic[Value]):
    """A reading that takes a share of the time, in a thread: a driver or a network file system may not answer."""

    def __init__(self, read: Callable[[], Value] | None, share: float, *, min_gap: float = 0.0) -> None:
        self._read, self._limit = read, RateLimit(share, min_gap)
        self._thread: threading.Thread | None = None
        self._begun = 0.0
        self._value: Value | None = None
        self.cpu = 0.0  # seconds that its threads used
        self.read_at: float | None = None  # when the last reading that has ended began

    def at(self, clock: float) -> Value | None:
        """What was read last: now, where it is due; None where nothing could be read."""
        if self._read is not None and not self.reading and self._limit.due(clock):
            self._begun = clock
            self._thread = start_daemon_thread(self._in_thread, "legroom-reading")
            if self._thread is None:
                self._work()
            else:
                self._thread.join(_FIRST_PATIENCE if self.read_at is None else _PATIENCE)
        return self._value

    @property
    def reading(self) -> bool:
        """Whether a reading has not ended yet."""
        return self._thread is not None and self._thread.is_alive()

    def why_late(self, clock: float) -> str | None:
        """Why what was read last is too old to be shown; None where it is not."""
        if not self.reading or clock - self._begun < _LATE:
            return None
        return say("no answer for more than {seconds:.0f} s", seconds=_LATE)

    def _in_thread(self) -> None:
        self._work()
        self.cpu += time.thread_time()

    def _work(self) -> None:
        assert self._read is not None
        began = time.perf_counter()
        try:
            self._value = self._read()
        except Exception:  # not readable, or an answer of another version of Legroom
            self._value = None
        self.read_at = self._begun
        self._limit.spent(self._begun, time.perf_counter() - began)


@dataclass(frozen=True, slots=True)
class PoolReadings:
    """All pools, read once."""

    pools: tuple[Pool, ...]
    swap_in: float | None
    swap_out: float | None
    pressure: tuple[Pressure, ...]
    ram: Memory  # with the counters of the cgroup
    gpus: Gpus
    gpu_at: float | None


@dataclass
class PoolReader:
    """Reads the pools: /dev/shm, RAM, swap and pressure every time, disk and GPUs within their rate limits."""

    host: Host
    _counters: SwapCounters = field(default_factory=lambda: SwapCounters(0.0, None, None))  # none yet: no rates
    _shm_path: str | None = None
    _scope: str = ""
    _nvml: NvmlSession = field(default_factory=NvmlSession)

    def __post_init__(self) -> None:
        self._disk = SlowReading(lambda: disk_pool(disks(self.host)), _DISK_SHARE, min_gap=5.0)
        self._gpus = SlowReading(self._read_gpus, _GPU_SHARE)
        self.slow = self._disk, self._gpus

    def read(self, clock: float, scope: str) -> PoolReadings:
        """Read all pools as process ``scope`` sees them."""
        ram = memory(self.host, scope)
        swapped = swap(self.host, ram, self._counters)
        self._counters = read_swap_counters(self.host)
        disk, found = self._disk.at(clock), self._gpus.at(clock) or _NO_GPUS
        if disk is None:
            disk = Pool("disk", None, None, None, "statvfs", say("no answer yet"))
        late, gpus_late = self._disk.why_late(clock), self._gpus.why_late(clock)
        return PoolReadings(
            pools=(
                self._read_shm(scope),
                ram_pool(ram),
                swap_pool(swapped),
                disk if late is None else _unknown(disk, late),
                *(pool if gpus_late is None else _unknown(pool, gpus_late) for pool in gpu_pools(found)),
            ),
            swap_in=swapped.in_rate,
            swap_out=swapped.out_rate,
            pressure=pressure(self.host, scope),
            ram=ram,
            gpus=found,
            gpu_at=self._gpus.read_at,
        )

    def close(self) -> None:
        """Release the GPU driver, unless it does not answer."""
        if not self._gpus.reading:
            self._nvml.close()

    def _read_shm(self, scope: str) -> Pool:
        if self.host.platform != "linux":
            why = say("{platform} has no /dev/shm", platform=self.host.platform)
            return Pool("shm", None, None, None, SHM, why)
        if self._shm_path is None or scope != self._scope:
            self._scope, self._shm_path = scope, self._shm_path_of(scope)
        return shm_space(self.host, self._shm_path)

    def _shm_path_of(self, scope: str) -> str:
        """Where the /dev/shm of that process is mounted: a container has its own."""
        namespace = self.host.link(f"/proc/{scope}/ns/mnt")
        if namespace is not None and namespace != self.host.link("/proc/self/ns/mnt"):
            path = f"/proc/{scope}/root{shm_mount(self.host, scope)[0]}"
            if self.host.disk_space(path) is not None:  # else its root may not be entered
                return path
        return shm_mount(self.host)[0]

    def _read_gpus(self) -> Gpus:
        found = gpus(self.host)
        if found.cards and self.host.live:
            self._nvml.open()
        return found


def _unknown(pool: Pool, why: str) -> Pool:
    return replace(pool, used=None, free=None, reason=why)
