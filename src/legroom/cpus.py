"""How many CPUs this process may run on.

Covers: the affinity mask. Does not cover: quotas of a cgroup, which slow threads down and do not forbid them
(probe.cpu).
"""

from __future__ import annotations

import os


def usable_cpus() -> int:
    """At least one."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
