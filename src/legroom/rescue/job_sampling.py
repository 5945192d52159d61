"""Sample the memory pools of a running job: /dev/shm, RAM, swap, descriptors, GPUs, disks; its idle time; raise alarms.

The OOM counter and /dev/shm are read up to 50 times a second, because a loader fills /dev/shm within one batch. The
other pools are read every second or two. The history keeps each reading of the last minute and thins older ones, so a
run of days ends with a few thousand.

Alarms follow the rules of `legroom watch`. Its own sampler lists every process of the machine; here the job's processes
are known, and a sample takes 0.6 ms instead of 4.3 (one process among eighty).
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from legroom.messages import say
from legroom.monitor.alarms import AlarmTracker
from legroom.probe.copy_on_write import WorkerCopies
from legroom.probe.filesystems_and_cgroups import Cgroup, cgroup, mounts
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
from legroom.records.failure import Level, Reading
from legroom.records.finding_and_alarm import Alarm
from legroom.records.machine import Gpus, MemoryEvents, Pool
from legroom.records.watch_sample import ProcessRow, Sample
from legroom.rescue.cgroup_and_oom_victims import JobCgroup, OomVictims
from legroom.rescue.job_shm_files import JobShmFiles
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

# Seconds between samples of /dev/shm, by the run's age: a loader fills it in the first seconds or not at all.
PAUSES = ((5.0, 0.02), (30.0, 0.05), (float("inf"), 0.1))
SLOW = ((60.0, 1.0), (float("inf"), 2.0))  # between samples of the other pools
_GPU_EVERY = 5.0
_MOST = 4000
_SHM = "/dev/shm"
_PRESSURE = "/proc/pressure/memory"
_MOST_PROCESSES = 64  # whose descriptors are counted
_FIND_GROUP_EVERY = 30  # reads of RAM between searches for the cgroup: a process may be moved
_EVERY = 1.0
_MAPS_EVERY = 10.0  # listing a torch process's thousand mappings takes a millisecond
_MOST_CWDS = 8
_MOST_MOUNTS = 200
# Their space is read without a server that may not answer.
_LOCAL = frozenset({"tmpfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "bcachefs", "vfat"})
_FULL = 0.98
_WRITABLE = re.compile(r"^\S+ rw.s \S+ \S+ \d+ +(/(?!dev/|memfd:|SYSV).*)$", re.M)
_DELETED = " (deleted)"
_MOST_KEPT = 100
_LONGEST_COMMAND = 160
_IDLE = 0.02  # of one core: polling loops use less, real work uses more
_TICKS = 100


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
        shm = self.shm()
        if shm is not None:
            self._peak("shm", shm)
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
        shm = self.shm()
        if shm is not None:
            self._peak("shm", shm)
        levels = {} if shm is None else {"shm": shm}
        self._keep(Reading(self.age, levels, self._swapped_back(), self.kills(), self._stalled()))
        return shm

    def shm(self) -> Level | None:
        """/dev/shm now."""
        room = self.host.disk_space(_SHM)
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


def recent_rate(history: list[Reading]) -> float | None:
    """Bytes per second swapped in over the last ten seconds."""
    known = [reading for reading in history if reading.swapped_back is not None]
    if len(known) < 2:
        return None
    end = known[-1]
    start = next((one for one in known if one.when >= end.when - 10.0), known[0])
    if end.when - start.when < 0.5:
        return None
    return ((end.swapped_back or 0) - (start.swapped_back or 0)) / (end.when - start.when)


def worst_stall(history: list[Reading]) -> float | None:
    """The worst PSI average of the last 15 seconds."""
    recent = (one.stalled for one in history if one.when >= history[-1].when - 15.0)
    return max((stalled for stalled in recent if stalled is not None), default=None)


def seconds_unread(history: list[Reading], pool: str) -> float | None:
    """Seconds from a pool's last sample to the end; None if it was never sampled."""
    samples = [one.when for one in history if pool in one.levels]
    return history[-1].when - samples[-1] if samples else None


@dataclass
class DiskLevels:
    """How full the disks are that the job writes to, each at its peak.

    A thread reads them, so that a network file system that does not answer blocks nothing else. Peaks are kept: a
    temporary file disappears with the process that filled the disk.
    """

    host: Host
    folders: Iterable[str]
    pids: Callable[[], list[int]] = list  # the job's processes
    _peaks: dict[int, tuple[str, Level]] = field(default_factory=dict)  # by device
    full_before: dict[str, Level] = field(default_factory=dict)  # other disks, full at the start and at the end
    _named: tuple[str, ...] = ()
    _before: dict[int, int] = field(default_factory=dict)  # bytes used at the start, by device; other mounts too
    _mapped: tuple[str, ...] = ()
    _maps_at: float = float("-inf")
    _stop: threading.Event = field(default_factory=threading.Event)
    reason: str | None = None  # why no disk is read
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start reading."""
        self._thread = start_daemon_thread(self._run, "legroom-disks")
        if self._thread is None:
            self.reason = say("disk usage: {why}", why=why_no_thread())

    def finish(self, within: float = 1.0, named: Iterable[str] = ()) -> dict[str, Level]:
        """Each disk's peak, by directory, including its present level if it is read within that time.

        ``named``: paths in the job's last messages. Their disks are read, too, and every local disk that became full
        meanwhile: a file may be written and the job be gone between two readings.
        """
        self._named = tuple(named)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within)
        return dict(list(self._peaks.values()))

    def _run(self) -> None:
        self._before = {device: level.used for device, (_, level) in self._local_disks().items()}
        while not self._stop.wait(_EVERY):
            self._read()
        self._finish_reading()

    def _finish_reading(self) -> None:
        """Read once more: the disks of paths that the job named, and local disks that are full now."""
        self.folders = (*filter(None, map(_existing_folder, self._named)), *self.folders)
        self._read()
        for device, (point, level) in self._local_disks().items():
            if level.share >= _FULL and device not in self._peaks:
                if level.used > self._before.get(device, 0):
                    self._peaks[device] = (point, level)
                else:
                    self.full_before[point] = level

    def _local_disks(self) -> dict[int, tuple[str, Level]]:
        """The mounted local disks, by device; not /dev/shm, which is sampled by itself."""
        found: dict[int, tuple[str, Level]] = {}
        for mount in mounts(self.host)[-_MOST_MOUNTS:]:
            inside = mount.point == _SHM or mount.point.startswith(("/dev/", "/proc/", "/sys/", "/run/"))
            if mount.kind not in _LOCAL or "ro" in mount.options or inside:
                continue
            read = self._level(mount.point)
            if read is not None:
                found.setdefault(read[0], (mount.point, read[1]))
        return found

    def _level(self, folder: str) -> tuple[int, Level] | None:
        """The device of a directory and how full it is."""
        room = self.host.disk_space(folder)
        if room is None or not room.size:
            return None
        try:
            device = os.stat(self.host.path(folder)).st_dev
        except OSError:
            return None
        # Blocks reserved for root do not count: a disk is full when nothing is free for us.
        return device, Level(room.size - room.free, room.size)

    def _read(self) -> None:
        pids = self.pids()[:_MOST_CWDS]
        if time.monotonic() - self._maps_at >= _MAPS_EVERY:
            self._maps_at = time.monotonic()
            self._mapped = tuple(dict.fromkeys(folder for pid in pids for folder in mapped_folders(self.host, pid)))
        places = (self.host.link(f"/proc/{pid}/cwd") for pid in pids)
        for folder in dict.fromkeys((*self.folders, *(place for place in places if place), *self._mapped)):
            if (read := self._level(folder)) is None:
                continue
            device, level = read
            old = self._peaks.get(device)
            if old is None or level.share >= old[1].share:
                self._peaks[device] = (old[0] if old else folder, level)


def _existing_folder(path: str) -> str | None:
    """The path, or the nearest directory above it; None if not even the first one exists here."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return None if path == "/" else path


def mapped_folders(host: Host, pid: int) -> list[str]:
    """Directories of files that a process maps for writing."""
    found = []
    for match in _WRITABLE.finditer(host.text(f"/proc/{pid}/maps") or ""):
        if not match[1].endswith(_DELETED):
            found.append(os.path.dirname(match[1]))
    return found


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
