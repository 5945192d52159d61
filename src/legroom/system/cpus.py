"""CPUs that this process may run on, and whether it may start threads.

legroom.probe.limits reads the cgroup's quota, which slows threads down.
"""

from __future__ import annotations

import os

try:
    import resource
except ImportError:  # Windows
    resource = None  # type: ignore[assignment]

_PER_THREAD = 72 << 20  # bytes of address space: a malloc arena and a stack


def usable_cpus() -> int:
    """The size of the affinity mask, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def room_for_threads(count: int) -> bool:
    """Whether ``ulimit -v`` leaves address space for so many more threads.

    CPython waits forever for a thread that runs out of memory before it has begun.
    """
    if resource is None or not os.path.exists("/proc/self/statm"):
        return True
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return True
    with open("/proc/self/statm", "rb") as statm:
        used = int(statm.read().split()[0]) * resource.getpagesize()
    return limit - used >= count * _PER_THREAD
