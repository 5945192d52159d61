"""Sample a running job: its memory pools, its files in /dev/shm, its idle time; raise alarms.

The OOM counter and /dev/shm are read up to 50 times a second, because a loader fills /dev/shm within one batch. The
other pools are read every second or two. The history keeps each reading of the last minute and thins older ones, so a
run of days ends with a few thousand.

Other jobs of the same user have files in /dev/shm, too, under names that do not show whose they are, and a file that no
process uses may be on its way from one process to another. So a file counts as the job's only if one of its processes
was seen to use it, or is named in it: torch writes its creator's pid into the name. In a container that pid alone
proves nothing, because another container with the same /dev/shm has the same pids. A file that appears and loses its
users between two samples may stay; `legroom doctor` lists it.

Alarms follow the rules of `legroom watch`. Its own sampler lists every process of the machine; here the job's processes
are known, and a sample takes 0.6 ms instead of 4.3 (one process among eighty).
"""

from __future__ import annotations

import contextlib
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.messages import say
from legroom.monitor.alarms import AlarmTracker
from legroom.probe.copy_on_write import WorkerCopies
from legroom.probe.filesystems_and_cgroups import Cgroup, cgroup
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.nvml import NvmlSession
from legroom.probe.process_and_limits import parse_limits, process_at, stat_fields
from legroom.probe.ram_swap_and_pressure import (
    SwapCounters,
    memory_in,
    parse_pressure,
    pressure,
    ram_pool,
    rate,
    read_swap_counters,
)
from legroom.probe.runtime_environment import in_initial_namespace
from legroom.probe.shm import kind_of, maker_of, shm
from legroom.probe.shm_segments import SHM, Segments, file_at
from legroom.records.failure import Reading
from legroom.records.finding_and_alarm import Alarm
from legroom.records.machine import Gpus, Level, MemoryEvents, Pool
from legroom.records.watch_sample import ProcessRow, Sample
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, OomVictims
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

# Seconds between samples of /dev/shm, by the run's age: a loader fills it in the first seconds or not at all.
PAUSES = ((5.0, 0.02), (30.0, 0.05), (float("inf"), 0.1))
SLOW = ((60.0, 1.0), (float("inf"), 2.0))  # between samples of the other pools
_GPU_EVERY = 5.0
_MOST = 4000
_PRESSURE = "/proc/pressure/memory"
_MOST_PROCESSES = 64  # whose descriptors are counted
_FIND_GROUP_EVERY = 30  # reads of RAM between searches for the cgroup: a process may be moved
_MOST_KEPT = 100
_SHARE = 0.02  # of one core, for looking at new files
_AGAIN = 1.0  # seconds until files without a known user are looked up again
_LONGEST_COMMAND = 160
_NEAR_END = 10.0  # seconds before the end in which a level counts
_IDLE = 0.02  # of one core: polling loops use less, real work uses more
_TICKS = 100


class JobShmFiles:
    """The files in /dev/shm that a job was seen to use."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._before = frozenset(host.names(SHM))
        self._pids_are_unique = bool(in_initial_namespace(host, "pid"))
        self._segments: Segments | None = None
        self._processes: set[int] = set()  # all that the job has had
        self._used: set[str] = set()
        self._others: set[str] = set()  # looked up, and used by none of the job's processes so far
        self._next = self._again = clock()

    def add_processes(self, pids: Iterable[int]) -> None:
        """Add processes of the job."""
        self._processes.update(pids)

    def update(self, pids: Callable[[], Sequence[int]]) -> None:
        """Look up the users of files that are new; ``pids`` are the job's processes."""
        began = self._clock()
        if began < self._next:
            return
        if began >= self._again:
            self._again = began + _AGAIN
            self._others.clear()
        names = self._new_names()
        self._used &= names
        unknown = names - self._used - self._others
        if unknown:
            present = pids()
            self.add_processes(present)
            self._used |= self._held(unknown, present)
            self._others |= unknown - self._used
        self._next = self._clock() + (self._clock() - began) / _SHARE

    def remove(self) -> int:
        """Remove those of them that no process uses, after the job's processes have ended; the bytes freed."""
        named = {name for name in self._new_names() if self._names_a_process(name)}
        freed = 0
        if not named and not self._used & self._new_names():
            return freed
        for file in shm(self._host).files:
            if file.owner != self._host.uid or file.mapped:
                continue
            # Whether torch's file is used can be unknown while another job's manager runs: the name tells.
            if file.name in named or (file.name in self._used and file.mapped is False):
                with contextlib.suppress(OSError):
                    os.unlink(self._host.path(f"{SHM}/{file.name}"))
                    freed += file.size
        return freed

    def _new_names(self) -> set[str]:
        """Files of torch and Python that were not there before the job."""
        names = set(self._host.names(SHM)) - self._before
        return {name for name in names if maker_of(name) is not None or kind_of(name) == "python"}

    def _names_a_process(self, name: str) -> bool:
        return self._pids_are_unique and maker_of(name) in self._processes

    def _held(self, names: set[str], pids: Sequence[int]) -> set[str]:
        """Those that one of the processes maps or has open."""
        if self._segments is None:
            self._segments = Segments.of(self._host)
        segments = self._segments
        segments.sizes.clear()  # of no use here, and there are new ones in every batch
        files = [(name, file_at(self._host, f"{segments.path}/{name}")) for name in names]
        left = {file.inode: name for name, file in files if file is not None}
        found: set[str] = set()
        for pid in pids:
            for read in (segments.opened, segments.mapped):
                if not left:
                    return found
                found |= {name for inode in read(pid) or () if (name := left.pop(inode, None)) is not None}
        return found


@dataclass(frozen=True, slots=True)
class GpuLevels:
    """GPU memory by pool, and what each process holds."""

    levels: Mapping[str, Level] = field(default_factory=dict)
    held: Mapping[int, int] = field(default_factory=dict)


@dataclass
class JobSampler:
    """Samples of one attempt."""

    host: Host
    cgroup: JobCgroup
    pids: Callable[[], list[int]]  # the job's processes
    written: Callable[[], int] = int  # bytes of output so far
    clock: Callable[[], float] = time.monotonic
    read_gpus: Callable[[], GpuLevels] = GpuLevels
    history: list[Reading] = field(default_factory=list)
    peaks: dict[str, Level] = field(default_factory=dict)
    present: list[int] = field(default_factory=list)  # the job's processes at the last slow sample
    nearest: int | None = None  # the one whose descriptors are "fds"
    gpus: GpuLevels = field(default_factory=GpuLevels)
    victims: OomVictims = field(init=False)
    shm_files: JobShmFiles = field(init=False)
    _group: Cgroup | None = None  # of the job's memory
    _group_reads: int = 0
    _began: float = 0.0
    _slow_at: float = 0.0
    _refaults: int | None = None
    _held: int = 0  # the cgroup's peak before the start: attempts share one cgroup
    _kept_shm: Level | None = None
    _shm_read_at: float = 0.0
    _shm_gaps: deque[tuple[float, float]] = field(default_factory=lambda: deque(maxlen=_MOST))  # end and length

    def __post_init__(self) -> None:
        self.victims = OomVictims(self.host, self.cgroup)
        self.shm_files = JobShmFiles(self.host, self.clock)

    def begin(self) -> None:
        """Read the counters before the job starts."""
        self._began = self.clock()
        self._slow_at = float("-inf")
        self.victims.begin()
        self._refaults = self.cgroup.swapped_back(self.host)
        self._held = self.cgroup.peak(self.host) or 0

    @property
    def age(self) -> float:
        """Seconds since the start."""
        return self.clock() - self._began

    @property
    def pause(self) -> float:
        """Seconds until the next sample."""
        return _by_age(PAUSES, self.age)

    @property
    def slow_pause(self) -> float:
        """Seconds between slow samples."""
        return _by_age(SLOW, self.age)

    def sample(self) -> Reading | None:
        """Take a fast sample; also a slow one when it is due, which is returned."""
        self.victims.update(self.age, self.written())
        self.shm_files.update(self.pids)
        shm = self._next_shm()
        if self.clock() - self._slow_at >= self.slow_pause:
            self._slow_at = self.clock()
            reading = self._slow(shm)
            self._keep(reading)
            return reading
        if shm is not None and self._jumped(shm):
            self._keep(Reading(self.age, {"shm": shm}))
        return None

    def sample_at_end(self) -> Level | None:
        """Sample /dev/shm and the counters when the job has ended."""
        self.victims.update(self.age, self.written())
        shm = self._next_shm()
        levels = {} if shm is None else {"shm": shm}
        self._keep(Reading(self.age, levels, self._swapped_back(), self.kills(), self._stalled()))
        return shm

    def _next_shm(self) -> Level | None:
        """/dev/shm now, as one of the samples."""
        shm, now = self.shm(), self.age
        if shm is not None:
            self._peak("shm", shm)
            self._shm_gaps.append((now, now - self._shm_read_at))
            self._shm_read_at = now
        return shm

    def shm_unread(self) -> float:
        """The longest time between two samples of /dev/shm in the last seconds."""
        since = self.age - _NEAR_END
        return max((length for end, length in self._shm_gaps if end >= since), default=0.0)

    def shm(self) -> Level | None:
        """/dev/shm now."""
        room = self.host.disk_space(SHM)
        return None if room is None or not room.size else Level(room.used, room.size)

    def kills(self) -> int | None:
        """OOM kills since the start."""
        return self.victims.kills

    def ram_peak(self) -> Level | None:
        """The kernel's RAM peak of the cgroup; None if it is not above the samples.

        Attempts share one cgroup, so only a peak above that of earlier attempts counts. Samples once a second miss
        memory that is allocated, and killed for, within a tenth of one.
        """
        peak, seen = self.cgroup.peak(self.host), self.peaks.get("ram")
        if peak is None or seen is None or peak <= max(self._held, seen.used):
            return None
        return Level(peak, seen.size)

    def _slow(self, shm: Level | None) -> Reading:
        levels: dict[str, Level] = {} if shm is None else {"shm": shm}
        pids = self.present = self.pids()
        self.victims.measure(pids)
        self.shm_files.add_processes(pids)
        if (ram := self._ram(str(pids[0]) if pids else "self")) is not None:
            levels["ram"] = ram
        if (swap := self._swap()) is not None:
            levels["swap"] = swap
        if (fds := self._descriptors(pids)) is not None:
            levels["fds"] = fds
        self.gpus = self.read_gpus()
        levels.update(self.gpus.levels)
        for name, level in levels.items():
            self._peak(name, level)
        return Reading(self.age, levels, self._swapped_back(), self.kills(), self._stalled())

    def _ram(self, pid: str) -> Level | None:
        """Usage of the tightest cgroup limit above a process, or of the machine's RAM."""
        if self._group is None or self._group_reads % _FIND_GROUP_EVERY == 0:
            self._group = cgroup(self.host, "memory", pid)
        self._group_reads += 1
        pool = ram_pool(memory_in(self.host, self._group))
        return None if pool.used is None or pool.size is None else Level(pool.used, pool.size)

    def _swapped_back(self) -> int | None:
        now = self.cgroup.swapped_back(self.host)
        return None if now is None or self._refaults is None else max(0, now - self._refaults) * mmap.PAGESIZE

    def _stalled(self) -> float | None:
        """PSI of the job's own cgroup (v2), otherwise of the machine."""
        own = f"{self.cgroup.path}/memory.pressure" if self.cgroup.own and self.cgroup.version == "v2" else _PRESSURE
        full = parse_pressure(self.host.text(own) or "").get("full")
        return None if full is None else full[0]

    def _swap(self) -> Level | None:
        info = self.host.table("/proc/meminfo")
        total, free = info.get("SwapTotal"), info.get("SwapFree")
        return Level(total - free, total) if total and free is not None else None

    def _descriptors(self, pids: list[int]) -> Level | None:
        """Descriptors of the process nearest its limit."""
        found = {}
        for pid in pids[:_MOST_PROCESSES]:
            names = self.host.names(f"/proc/{pid}/fd")
            limit = parse_limits(self.host.text(f"/proc/{pid}/limits") or "").get("Max open files")
            if names and limit:
                found[pid] = Level(len(names), limit)
        self.nearest = max(found, key=lambda pid: found[pid].share, default=None)
        return None if self.nearest is None else found[self.nearest]

    def _peak(self, name: str, level: Level) -> None:
        old = self.peaks.get(name)
        if old is None or level.share >= old.share:
            self.peaks[name] = level

    def _jumped(self, shm: Level) -> bool:
        """Whether /dev/shm changed by more than 5 % since the last kept reading."""
        return self._kept_shm is None or abs(shm.used - self._kept_shm.used) * 20 > shm.size

    def _keep(self, reading: Reading) -> None:
        self._kept_shm = reading.levels.get("shm", self._kept_shm)
        self.history.append(reading)
        if len(self.history) > _MOST:
            half = len(self.history) // 2
            self.history = self.history[:half:2] + self.history[half:]


@dataclass
class GpuReader:
    """Reads GPU memory every few seconds, in a thread: NVML may not answer for minutes once a GPU is lost."""

    host: Host
    reason: str | None = None  # why no GPU is read
    _levels: GpuLevels = field(default_factory=GpuLevels)
    _read_at: float = float("-inf")
    _stop: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Start reading, where there is a GPU."""
        if self.host.exists("/dev/nvidiactl") and start_daemon_thread(self._run, "legroom-gpus") is None:
            self.reason = say("GPU memory: {why}", why=why_no_thread())

    def now(self) -> GpuLevels:
        """The last reading; nothing if it is old."""
        return self._levels if time.monotonic() - self._read_at < 3 * _GPU_EVERY else GpuLevels()

    def close(self) -> None:
        """Read no more. A call that is not answered is not waited for."""
        self._stop.set()

    def _run(self) -> None:
        session = NvmlSession()  # without it each reading would open every GPU again
        while not self._stop.is_set():
            found = gpus(self.host)
            if found.cards:
                session.open()
            self._levels, self._read_at = _levels(found), time.monotonic()
            self._stop.wait(_GPU_EVERY)
        session.close()


def _levels(found: Gpus) -> GpuLevels:
    pools = {pool.name: Level(pool.used, pool.size) for pool in gpu_pools(found) if pool.used is not None and pool.size}
    held: dict[int, int] = {}
    for card in found.cards:
        for user in card.processes or ():
            if user.used is not None and user.command is not None:  # otherwise the pid is from another namespace
                held[user.pid] = held.get(user.pid, 0) + user.used
    return GpuLevels(pools, held)


def _by_age(steps: tuple[tuple[float, float], ...], age: float) -> float:
    return next(pause for until, pause in steps if age < until)


@dataclass
class StallDetector:
    """Detects a job that neither uses CPU nor prints."""

    limit: float  # seconds; 0: never
    _since: float | None = None
    _cpu: float = 0.0
    _written: int = -1

    def stalled(self, now: float, cpu: float, written: int) -> bool:
        """Whether the job printed nothing and used no CPU for longer; takes its CPU seconds and output bytes so far."""
        span = 0.0 if self._since is None else now - self._since
        worked = cpu - self._cpu > max(0.05, span * _IDLE)
        # The sum of CPU time falls when a worker exits: that counts as activity.
        if self._since is None or worked or cpu < self._cpu or written != self._written:
            self._since, self._cpu, self._written = now, cpu, written
            return False
        return 0 < self.limit <= span


def cpu_seconds(host: Host, pids: Sequence[int]) -> float:
    """CPU time that these processes have used."""
    total = 0
    for pid in pids:
        fields = stat_fields(host, pid)
        if len(fields) > 12:
            total += int(fields[11]) + int(fields[12])
    return total / _TICKS


@dataclass
class JobAlarms:
    """The alarms of one attempt."""

    sampler: JobSampler
    raised: deque[Alarm] = field(default_factory=lambda: deque(maxlen=_MOST_KEPT))
    _alarms: AlarmTracker = field(default_factory=AlarmTracker)
    _rows: dict[int, ProcessRow] = field(default_factory=dict)  # by pid, as last read
    _swap: SwapCounters | None = None
    _copies: WorkerCopies = field(init=False)

    def __post_init__(self) -> None:
        self._copies = WorkerCopies(self.sampler.host)

    def update(self, reading: Reading) -> tuple[Alarm, ...]:
        """Alarms that begin or turn critical with this reading; ``since`` counts from the job's start."""
        moment = self._alarms.add(self._sample(reading))
        begun = tuple(replace(alarm, since=reading.when) for alarm in moment.begun)
        self.raised.extend(begun)
        return begun

    def _sample(self, reading: Reading) -> Sample:
        sampler = self.sampler
        rows = self._read_rows(reading)
        inward, outward = self._swap_rates()
        scope = "machine" if sampler.cgroup.path is None else "cgroup"
        _, source = sampler.cgroup.counters(sampler.host)
        return Sample(
            when=reading.when,
            clock=reading.when,
            interval=sampler.slow_pause,
            watched="",
            # Descriptors are not bytes: the rules read them from the process row.
            pools=tuple(_pool(name, level) for name, level in reading.levels.items() if name != "fds"),
            processes=rows,
            swap_in=inward,
            swap_out=outward,
            pressure=pressure(sampler.host, str(rows[0].pid) if rows else "self"),
            events=MemoryEvents(reading.oom_kills, None, None, scope, source),
        )

    def _read_rows(self, reading: Reading) -> tuple[ProcessRow, ...]:
        sampler, before = self.sampler, self._rows
        fds = reading.levels.get("fds")
        new = ProcessRow(0, 0, "", born=reading.when if before else None)
        self._rows = {}
        for pid in sampler.present:
            found = process_at(sampler.host, pid)
            if found is None:
                continue
            nearest = fds if pid == sampler.nearest else None
            self._rows[pid] = replace(
                before.get(pid, new),
                pid=pid,
                parent=found.parent,
                command=found.command[:_LONGEST_COMMAND],
                rss=found.rss,
                rss_shmem=found.rss_shmem,
                swap=found.swap,
                fds=nearest.used if nearest else None,
                fd_limit=nearest.size if nearest else None,
                gpu=sampler.gpus.held.get(pid),
            )
        if len(self._rows) > 1:  # a single process has no workers
            self._rows |= self._copies.update(self._rows.values(), reading.when)
        return tuple(self._rows.values())

    def _swap_rates(self) -> tuple[float | None, float | None]:
        """Bytes per second swapped in and out on the machine since the last sample."""
        before, now = self._swap, read_swap_counters(self.sampler.host)
        self._swap = now
        if before is None:
            return None, None
        seconds = now.when - before.when
        return rate(before.swapped_in, now.swapped_in, seconds), rate(before.swapped_out, now.swapped_out, seconds)


def _pool(name: str, level: Level) -> Pool:
    return Pool(name, level.size, level.used, max(0, level.size - level.used), "")
