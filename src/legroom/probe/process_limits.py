"""Limits of a process: descriptors, pinned memory, CPUs, and the length of socket paths.

Pinned memory is taken from RAM, and no counter shows what CUDA pinned. With RLIMIT_MEMLOCK at 64 kB and no capability,
1 GiB of cudaHostAlloc and 1 GiB of cudaHostRegister both succeeded, and VmLck and VmPin stayed 0. The first showed in
RssShmem, the second in RssAnon (Linux 6.18, driver 580; tests/gpu/test_gpu_probe.py repeats it).

CPU weights and shares are not read: they limit nothing on an idle machine.

Python processes send descriptors through a socket in the temporary directory; torch's DataLoader sends batches
that way. A socket path has at most 107 bytes on Linux, 103 on macOS and the BSDs. Measured with torch 2.13 and Python
3.11: 75 bytes of TMPDIR work. From 76 on, under fork and spawn, every batch is lost and the loader waits for ever;
under forkserver the workers do not start.
"""

from __future__ import annotations

import os
from collections.abc import Mapping

from legroom.messages import joined, say
from legroom.probe.cgroup_paths import Version, cgroup
from legroom.probe.host import UNLIMITED, Host
from legroom.records import Cpu, Limits, Pool, Process, Temporary
from legroom.system.imports import import_lock
from legroom.units import format_size


def limits(host: Host) -> Limits:
    """The limits of this process; what could not be read is None, with a ``reason``."""
    reasons: list[str] = []
    soft, hard = _pair(host, "nofile", reasons)
    locked, _ = _pair(host, "memlock", reasons)
    open_fds = _open_fds(host)
    if open_fds is None:
        reasons.append(say("open descriptors unknown: {why}", why=_cannot_list(host)))
    overcommit = host.number("/proc/sys/vm/overcommit_memory")
    if overcommit is None and host.platform == "linux":
        reasons.append(host.why("/proc/sys/vm/overcommit_memory"))
    return Limits(
        nofile_soft=soft,
        nofile_hard=hard,
        memlock_soft=locked,
        open_fds=open_fds,
        source=say("getrlimit, {fds}", fds=_fd_folder(host)),
        overcommit=overcommit,
        reason=joined(reasons) or None,
    )


def fds_pool(limits: Limits, process: Process | None = None) -> Pool:
    """File descriptors: the limit is per process, so ``used`` is known for a given process only."""
    if process is None:
        reason = say("the limit is per process, and no process was given")
        if limits.nofile_soft is None:
            reason = limits.reason or reason
        return Pool("fds", limits.nofile_soft, None, None, "RLIMIT_NOFILE, soft", reason)
    size = limits.nofile_soft if process.fd_limit is None else process.fd_limit
    used = process.fds
    free = None if size is None or used is None else max(0, size - used)
    reason_named = None
    if used is None:
        reason_named = say("no permission to list the descriptors of process {pid}", pid=process.pid)
    elif size is None:
        reason_named = limits.reason
    return Pool("fds", size, used, free, f"/proc/{process.pid}/limits, /proc/{process.pid}/fd", reason_named)


def pinned_pool(ram: Pool, limits: Limits, pinned: int | None = None) -> Pool:
    """Page-locked memory: its size is the free RAM; ``pinned`` is the kernel's VmPin, if read."""
    bound = (
        say(
            "RLIMIT_MEMLOCK is {size}, which does not limit CUDA's pinned memory", size=format_size(limits.memlock_soft)
        )
        if limits.memlock_soft is not None
        else say("no RLIMIT_MEMLOCK found")
    )
    # VmPin misses what CUDA pins, so 0 means unknown and more than 0 is a lower bound.
    used = pinned or None
    known = (
        say("the kernel does not count memory pinned by CUDA")
        if used is None
        else say("lower bound (VmPin): memory pinned by CUDA is not counted")
    )
    return Pool(
        "pinned", ram.size, used, ram.free, say("taken from ram: {source}", source=ram.source), joined((known, bound))
    )


def _pair(host: Host, name: str, reasons: list[str]) -> tuple[int | None, int | None]:
    label = f"RLIMIT_{name.upper()}"
    try:
        pair = host.rlimit(name)
    except (OSError, ValueError, TypeError, IndexError, AttributeError):  # a system or a recording without it
        pair = None
    if pair is None:
        reasons.append(say("{label} is not available here", label=label))
        return None, None
    if pair[0] == UNLIMITED:
        reasons.append(say("{label} is unlimited", label=label))
    soft, hard = (None if value == UNLIMITED else value for value in pair)
    return soft, hard


def _fd_folder(host: Host) -> str:
    return "/dev/fd" if host.platform == "darwin" else "/proc/self/fd"


def _open_fds(host: Host) -> int | None:
    folder = _fd_folder(host)
    names = [name for name in host.names(folder) if name.isdigit()]
    # Listing the directory itself uses a descriptor, which is closed afterwards.
    still = sum(1 for name in names if host.exists(f"{folder}/{name}") or host.link(f"{folder}/{name}") is not None)
    return still or None


def _cannot_list(host: Host) -> str:
    folder = _fd_folder(host)
    return say("{folder} is empty", folder=folder) if host.exists(folder) else host.why(folder)


def cpu(host: Host, pid: str = "self") -> Cpu:
    """The CPUs ``pid`` may run on, and the smallest quota of its cgroups, in cores."""
    affinity, source = _affinity(host, pid)
    group = cgroup(host, "cpu", pid)
    quotas = [(quota, file) for path in group.chain for quota, file in (_quota(host, group.version, path),) if quota]
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
    """The cores that a cgroup's quota allows (None: no quota), and the file it was read from."""
    if version == "v2":
        file = f"{path}/cpu.max"
        words = (host.text(file) or "").split()
    else:
        file = f"{path}/cpu.cfs_quota_us"
        words = f"{host.text(file) or ''} {host.text(f'{path}/cpu.cfs_period_us') or ''}".split()
    try:
        quota, period = (int(word) for word in words)
    except ValueError:  # "max", empty, invalid
        return None, file
    # v1 writes -1 for no quota. A period is at least 1 ms and a quota fits in 64 bits; anything else is invalid.
    return (quota / period if 0 < quota < 1 << 64 and period > 0 else None), file


NAMES = ("TMPDIR", "TEMP", "TMP")  # in the order in which tempfile reads them
TAIL = len("/pymp-12345678/listener-12345678")
_SHORT_TAIL = len("/pymp-12345678/sock-12345678")


def temporary(host: Host, pid: str = "self") -> Temporary | None:
    """The directory that the environment names; None if none is named, or without such sockets (Windows)."""
    if host.platform == "win32":
        return None
    env = _environment(host, pid)
    for name in NAMES:
        path = env.get(name)
        if path and host.exists(path):
            path = os.path.abspath(path)
            length = len(os.fsencode(path))
            longest = longest_socket(host.platform)
            taken = length + TAIL
            # Pythons that switch to /tmp by themselves assume this length, whatever the socket's name.
            if host.live and _moves_away() and length + _SHORT_TAIL > longest:
                taken = len("/tmp") + TAIL
            return Temporary(path, name, taken, longest)
    return None


def longest_socket(platform: str) -> int:
    """The longest path of a socket in bytes: the size of its field, less the final zero."""
    return 107 if platform == "linux" else 103


def _environment(host: Host, pid: str) -> Mapping[str, str]:
    """The environment the process was started with; this process's if it may not be read."""
    text = None if pid == "self" else host.text(f"/proc/{pid}/environ")
    if not text:
        return host.env
    pairs = (line.partition("=") for line in text.split("\0"))
    return {name: value for name, _, value in pairs}


def _moves_away() -> bool:
    """Whether this Python itself avoids a directory that is too long, as 3.14 and some older ones do."""
    with import_lock:
        from multiprocessing import util

    return hasattr(util, "_get_base_temp_dir")
