"""A box at one moment: its pools, its place, its processes.

Covers: what probes read. Does not cover: what is made of it (advice.py), datasets (entry.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PlaceKind = Literal["bare", "docker", "podman", "kubernetes", "slurm", "wsl", "container"]


@dataclass(frozen=True, slots=True)
class Pool:
    """Something that can run out: its size, what is used and free, and where that was read."""

    name: str
    size: int | None
    used: int | None
    free: int | None
    source: str
    reason: str | None = None

    @property
    def used_share(self) -> float | None:
        """Used as a share of the size, where both are known and the size is not zero."""
        if self.used is None or not self.size:
            return None
        return self.used / self.size


@dataclass(frozen=True, slots=True)
class Place:
    """Where this runs, and what its user may change there."""

    kind: PlaceKind
    how: str  # what it was recognised by
    platform: str  # sys.platform
    root: bool
    may_mount: bool  # holds CAP_SYS_ADMIN: remounting /dev/shm can work
    sudo: bool | None  # None: cannot tell without trying
    rights_how: str
    kernel: str | None = None


@dataclass(frozen=True, slots=True)
class Leftover:
    """A file in /dev/shm, and whether a living process still uses it."""

    name: str
    kind: str  # torch, python, semaphore, nccl, legroom, other
    size: int  # by blocks: what it takes
    age: float  # seconds since it was last written
    mapped: bool | None  # None: some processes could not be looked into
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
    hidden: int | None = None  # used − what the visible files and deleted-but-mapped ones explain
    unreadable_processes: int = 0
    removed_at_logout: bool | None = None
    removed_how: str = ""
    reason: str | None = None
    unlinked: int | None = None  # blocks of files without a name that living processes still hold


@dataclass(frozen=True, slots=True)
class CgroupLevel:
    """One memory cgroup on the way from one's own to the top of what can be seen."""

    path: str
    limit: int | None = None  # None: no limit here
    high: int | None = None
    usage: int | None = None
    unreclaimable: int | None = None
    swap_limit: int | None = None
    swap_used: int | None = None

    @property
    def room(self) -> int | None:
        """What may still be allocated before this level's limit bites."""
        if self.limit is None or self.unreclaimable is None:
            return None
        return max(0, self.limit - self.unreclaimable)


@dataclass(frozen=True, slots=True)
class MemoryEvents:
    """The counters of one's own memory cgroup, or of the whole machine where there is none."""

    oom_kills: int | None
    at_limit: int | None  # v2 `max`, v1 failcnt: how often the limit was hit
    throttled: int | None  # v2 `high`
    scope: str  # "cgroup" or "machine"
    source: str
    machine_oom_kills: int | None = None  # kills anywhere on the machine, whichever group they were in


@dataclass(frozen=True, slots=True)
class Memory:
    """RAM: the machine's and what the cgroups leave of it."""

    total: int | None
    available: int | None
    cgroup: Literal["v1", "v2"] | None
    levels: tuple[CgroupLevel, ...]  # one's own first
    above_hidden: bool | None  # the topmost level seen is not the machine's root
    events: MemoryEvents
    peak: int | None
    source: str
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Swap:
    """Swap space, and whether pages move now."""

    total: int | None
    used: int | None
    in_rate: float | None  # bytes a second
    out_rate: float | None
    interval: float | None
    cgroup_limit: int | None  # None: no limit; a v2 group's memory.swap.max, v1's memsw less memory
    source: str
    reason: str | None = None
    cgroup_used: int | None = None  # at the level that has the limit


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
    command: str | None  # None: the pid matches nobody we can see


@dataclass(frozen=True, slots=True)
class Gpu:
    """One card, or one MIG slice of it."""

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
    reason: str | None = None  # why no card could be read


@dataclass(frozen=True, slots=True)
class Cpu:
    affinity: int | None
    quota: float | None  # cores the cgroup's quota allows; None: no quota
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
    """Room on one filesystem that matters."""

    role: str  # "store" or "work"
    path: str
    size: int | None
    free: int | None
    filesystem: str | None
    reason: str | None = None
    used: int | None = None  # less than size − free where some is reserved for root


@dataclass(frozen=True, slots=True)
class Temporary:
    """The folder for temporary files, where the environment names one."""

    path: str
    source: str  # TMPDIR, TEMP or TMP
    socket: int  # bytes that the path of a worker's socket takes below it
    longest: int  # bytes that the path of a socket may take


@dataclass(frozen=True, slots=True)
class Process:
    """One process and what it holds of each pool; None where it may not be looked at."""

    pid: int
    parent: int
    command: str
    uid: int | None
    rss: int | None = None
    pss: int | None = None
    rss_shmem: int | None = None
    shm: int | None = None  # blocks in /dev/shm of the files it maps or holds open
    shm_mapped: int | None = None  # address space mapped from /dev/shm
    swap: int | None = None
    locked: int | None = None
    pinned: int | None = None
    fds: int | None = None
    fd_limit: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Box:
    """All pools, the place and the processes of interest at one moment."""

    when: float
    place: Place
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
        """The pool of that name, or None where this box has none such."""
        return next((pool for pool in self.pools if pool.name == name), None)
