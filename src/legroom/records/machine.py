"""A machine at one moment: memory pools, limits, processes, environment, as probes read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

from legroom.messages import say

RuntimeKind = Literal["bare", "docker", "podman", "kubernetes", "slurm", "wsl", "container"]


@dataclass(frozen=True, slots=True)
class Pool:
    """A memory pool: its size, what is used and free, and the source of the figures."""

    name: str
    size: int | None
    used: int | None
    free: int | None
    source: str
    reason: str | None = None

    @property
    def used_share(self) -> float | None:
        """Used as a share of the size; None if unknown or the size is zero."""
        if self.used is None or not self.size:
            return None
        return self.used / self.size


@dataclass(frozen=True, slots=True)
class Level:
    """How full one pool was."""

    used: int
    size: int

    @property
    def share(self) -> float:
        """Used as a share of the size; 0 if the size is 0."""
        return self.used / self.size if self.size else 0.0


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes of a memory pool that can be taken now, and the limit that decides. Can be used as an int."""

    pool: str
    bytes: int | None  # None: unknown, see why
    why: str  # the limit that decides, with its numbers

    def __index__(self) -> int:
        if self.bytes is None:
            raise TypeError(self.why)
        return self.bytes

    __int__ = __index__


@dataclass(frozen=True, slots=True)
class RuntimeEnvironment:
    """The environment (container, scheduler, bare machine) and the user's privileges."""

    kind: RuntimeKind
    how: str  # how it was recognised
    platform: str  # sys.platform
    root: bool
    may_mount: bool  # has CAP_SYS_ADMIN: remounting /dev/shm can work
    sudo: bool | None  # None: unknown without trying
    rights_how: str
    kernel: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file in /dev/shm, and whether a process still uses it."""

    name: str
    kind: str  # torch, python, semaphore, nccl, legroom, other
    size: int  # allocated blocks
    age: float  # seconds since it was last written
    mapped: bool | None  # None: some processes could not be read
    owner: int  # uid


@dataclass(frozen=True, slots=True)
class Shm:
    """The tmpfs at /dev/shm."""

    path: str
    mounted: bool  # a tmpfs of its own, not a directory of the root filesystem
    size: int | None
    used: int | None
    free: int | None
    mode: int | None
    owner: int | None
    writable: bool | None
    source: str
    files: tuple[Leftover, ...] = ()
    hidden: int | None = None  # used − visible files − deleted files that are still mapped
    unreadable_processes: int = 0
    removed_at_logout: bool | None = None
    removed_how: str = ""
    reason: str | None = None
    unlinked: int | None = None  # blocks of deleted files that processes still use


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """One memory cgroup on the path from the process's own to the topmost visible one."""

    path: str
    limit: int | None = None  # None: no limit here
    high: int | None = None
    usage: int | None = None
    unreclaimable: int | None = None
    swap_limit: int | None = None
    swap_used: int | None = None
    shmem: int | None = None  # pages of tmpfs files and shared memory that are charged here

    @property
    def room(self) -> int | None:
        """Bytes left below this level's limit."""
        if self.limit is None or self.unreclaimable is None:
            return None
        return max(0, self.limit - self.unreclaimable)


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """Counters of the process's memory cgroup, or of the machine if it has none."""

    oom_kills: int | None
    at_limit: int | None  # v2 `max`, v1 failcnt: how often the limit was hit
    throttled: int | None  # v2 `high`
    scope: str  # "cgroup" or "machine"
    source: str
    machine_oom_kills: int | None = None  # kills on the whole machine, in any cgroup


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM: the machine's, and the limits of the cgroups."""

    total: int | None
    available: int | None
    cgroup: Literal["v1", "v2"] | None
    levels: tuple[CgroupLevel, ...]  # the process's own first
    above_hidden: bool | None  # the topmost visible level is not the machine's root
    events: MemoryEvents
    peak: int | None
    source: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap space, and swap traffic now."""

    total: int | None
    used: int | None
    in_rate: float | None  # bytes per second
    out_rate: float | None
    interval: float | None
    cgroup_limit: int | None  # v2 memory.swap.max, v1 memsw less memory; None: no limit
    source: str
    reason: str | None = None
    cgroup_used: int | None = None  # at the cgroup with the limit


@dataclass(frozen=True, slots=True)
class Pressure:
    """PSI of one scope: the share of time some or all tasks stalled on memory."""

    scope: str  # "machine" or "cgroup"
    some_avg10: float
    some_avg60: float
    full_avg10: float
    full_avg60: float
    source: str


@dataclass(frozen=True, slots=True)
class GpuProcess:
    pid: int
    used: int | None
    command: str | None  # None: the pid is not visible here


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU or MIG instance."""

    index: int
    name: str
    uuid: str
    size: int | None
    used: int | None
    free: int | None
    processes: tuple[GpuProcess, ...] | None
    mig: bool = False
    spilled: int | None = None  # bytes in the host's memory (Windows)
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Gpus:
    cards: tuple[Gpu, ...]
    on_bus: int | None  # NVIDIA display devices on the PCI bus, driver or not
    driver: str | None
    source: str
    reason: str | None = None  # why no GPU could be read


@dataclass(frozen=True, slots=True)
class Cpu:
    affinity: int | None
    quota: float | None  # cores allowed by the cgroup's quota; None: no quota
    source: str


@dataclass(frozen=True, slots=True)
class Limits:
    """Per-process limits."""

    nofile_soft: int | None
    nofile_hard: int | None
    memlock_soft: int | None  # None: unlimited or unknown, see reason
    open_fds: int | None
    source: str
    overcommit: int | None = None  # vm.overcommit_memory
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Disk:
    """Free space of the filesystem of the store or of the working directory."""

    role: str  # "store" or "work"
    path: str
    size: int | None
    free: int | None
    filesystem: str | None
    reason: str | None = None
    used: int | None = None  # less than size − free if blocks are reserved for root


@dataclass(frozen=True, slots=True)
class Temporary:
    """The directory for temporary files, if the environment names one."""

    path: str
    source: str  # TMPDIR, TEMP or TMP
    socket: int  # length of a worker's socket path in it, in bytes
    longest: int  # limit for the length of a socket path


@dataclass(frozen=True, slots=True)
class Process:
    """One process and what it uses of each pool; None if it may not be read."""

    pid: int
    parent: int
    command: str
    uid: int | None
    rss: int | None = None
    pss: int | None = None
    rss_shmem: int | None = None
    shm: int | None = None  # blocks of the /dev/shm files it maps or has open
    shm_mapped: int | None = None  # address space mapped from /dev/shm
    swap: int | None = None
    locked: int | None = None
    pinned: int | None = None
    fds: int | None = None
    fd_limit: int | None = None
    gpu: int | None = None
    rss_anon: int | None = None
    rss_file: int | None = None


@dataclass(frozen=True, slots=True)
class Machine:
    """The machine at one moment: its memory pools, its environment and relevant processes."""

    when: float
    runtime: RuntimeEnvironment
    pools: tuple[Pool, ...]
    shm: Shm
    memory: Memory
    swap: Swap
    pressure: tuple[Pressure, ...]
    gpus: Gpus
    cpu: Cpu
    limits: Limits
    disks: tuple[Disk, ...]
    processes: tuple[Process, ...] = ()
    temporary: Temporary | None = None

    def pool(self, name: str) -> Pool | None:
        """The pool of that name, or None if the machine does not have it."""
        return next((pool for pool in self.pools if pool.name == name), None)

    def with_free(self, free: Mapping[str, int]) -> Machine:
        """The machine with other free bytes in these pools."""
        pools = (replace(pool, free=free[pool.name]) if pool.name in free else pool for pool in self.pools)
        return replace(self, pools=tuple(pools))

    @property
    def ram_limit(self) -> int | None:
        """The RAM limit of a cgroup; None where it is not below the machine's RAM: there is no limit to raise."""
        ram, total = self.pool("ram"), self.memory.total
        limited = ram is not None and ram.size is not None and (total is None or ram.size < total)
        return ram.size if ram is not None and limited else None


def scope_name(scope: str) -> str:
    """The scope as a translated word; programs read the scope itself."""
    return say("cgroup") if scope == "cgroup" else say("machine")
