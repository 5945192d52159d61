"""How much CPU a process may use: the CPUs it may run on and the quota of its cgroups.

Covers: affinity (which a cpuset narrows too), v2 ``cpu.max``, v1 ``cpu.cfs_quota_us``. Does not cover: shares and
weights, which bound nothing on an idle machine, nor how busy the CPUs are.
"""

from __future__ import annotations

from legroom.model import Cpu
from legroom.probe.cgroup import Version, cgroup
from legroom.probe.host import Host


def cpu(host: Host, pid: str = "self") -> Cpu:
    """The CPUs ``pid`` may run on and the smallest quota over its groups, in cores."""
    affinity, source = _affinity(host, pid)
    group = cgroup(host, "cpu", pid)
    quotas = [
        (quota, file) for path in group.chain for quota, file in (_quota(host, group.version, path),) if quota
    ]
    if not quotas:
        return Cpu(affinity, None, source)
    quota, file = min(quotas)
    return Cpu(affinity, quota, f"{source}, {file}")


def _affinity(host: Host, pid: str) -> tuple[int | None, str]:
    if pid == "self":
        count = host.affinity
        return (count if isinstance(count, int) and count > 0 else None), "sched_getaffinity"
    file = f"/proc/{pid}/status"
    for line in (host.text(file) or "").split("\n"):
        name, _, value = line.partition(":")
        if name == "Cpus_allowed":  # a mask in hexadecimal, 32 bits between commas
            try:
                return int(value.strip().replace(",", ""), 16).bit_count() or None, file
            except ValueError:
                break
    return None, file


def _quota(host: Host, version: Version | None, path: str) -> tuple[float | None, str]:
    """The cores one group's quota allows, None where it has none, and the file that says so."""
    if version == "v2":
        file = f"{path}/cpu.max"
        words = (host.text(file) or "").split()
    else:
        file = f"{path}/cpu.cfs_quota_us"
        words = f"{host.text(file) or ''} {host.text(f'{path}/cpu.cfs_period_us') or ''}".split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", nothing, nonsense
        return None, file
    # v1 writes -1 for no quota. A period is at least a millisecond and a quota fits 64 bits: the rest is nonsense.
    return (quota / period if 0 < quota < 1 << 64 and period > 0 else None), file
