"""A healthy machine to change one thing of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from legroom.records.machine import (
    CgroupLevel,
    Cpu,
    Disk,
    Gpus,
    Limits,
    Machine,
    Memory,
    MemoryEvents,
    Pool,
    RuntimeEnvironment,
    Shm,
    Swap,
)

MB, GB = 1 << 20, 1 << 30


def healthy(**changes: Any) -> Machine:
    """A bare machine of 64 GB with 16 cores and nothing to complain about."""
    machine = Machine(
        when=0.0,
        runtime=RuntimeEnvironment("bare", "no container mark", "linux", root=True, may_mount=True, sudo=False, rights_how="root"),
        pools=(
            Pool("shm", 32 * GB, 0, 32 * GB, "statvfs /dev/shm"),
            Pool("ram", 64 * GB, 8 * GB, 56 * GB, "/proc/meminfo MemTotal"),
            Pool("swap", 0, 0, 0, "/proc/meminfo"),
            Pool("fds", 65536, None, None, "RLIMIT_NOFILE", "each process has its own"),
            Pool("disk", 500 * GB, 100 * GB, 400 * GB, "statvfs /var/tmp"),
        ),
        shm=Shm("/dev/shm", True, 32 * GB, 0, 32 * GB, 0o1777, 0, True, "statvfs /dev/shm"),
        memory=Memory(
            64 * GB, 56 * GB, "v2", (CgroupLevel("/sys/fs/cgroup/user.slice"),), False,
            MemoryEvents(0, 0, 0, "cgroup", "memory.events"), None, "/proc/meminfo",
        ),
        swap=Swap(0, 0, 0.0, 0.0, 0.1, None, "/proc/vmstat"),
        pressure=(),
        gpus=Gpus((), 0, None, "NVML", "no NVIDIA driver"),
        cpu=Cpu(16, None, "sched_getaffinity"),
        limits=Limits(65536, 65536, None, 5, "getrlimit"),
        disks=(Disk("store", "/var/tmp", 500 * GB, 400 * GB, "ext4"), Disk("work", "/home/me", 500 * GB, 400 * GB, "ext4")),
    )  # fmt: skip
    return replace(machine, **changes)


def with_pool(
    machine: Machine, name: str, size: int | None, used: int | None, free: int | None, **more: Any
) -> Machine:
    """The machine with one pool replaced or added."""
    pool = Pool(name, size, used, free, more.pop("source", f"test {name}"), **more)
    return replace(machine, pools=(*(p for p in machine.pools if p.name != name), pool))
