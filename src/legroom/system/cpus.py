"""CPUs that this process may run on. legroom.probe.limits reads the cgroup's quota, which slows threads down."""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """The size of the affinity mask, at least 1."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
