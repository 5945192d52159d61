"""Per-process limits, and the two pools that are limits rather than memory: descriptors and pinned memory.

Covers: RLIMIT_NOFILE, RLIMIT_MEMLOCK, descriptors this process has open, vm.overcommit_memory.
Does not cover: other processes' descriptors (process.py), pressure on the pools (budget).

Pinned memory has no pool of its own. It comes out of RAM, and what CUDA pins has no counter of its own: with
RLIMIT_MEMLOCK at 64 kB and no capability, 1 GiB of cudaHostAlloc and 1 GiB of cudaHostRegister both succeeded,
and VmLck and VmPin stayed 0 throughout; the first showed in RssShmem, among other things, the second in RssAnon
(Linux 6.18, driver 580; tests/gpu/test_gpu_probe.py does it again).
"""

from __future__ import annotations

from legroom.model import Limits, Pool, Process
from legroom.probe.host import UNLIMITED, Host
from legroom.units import format_size
from legroom.words import joined, say


def limits(host: Host) -> Limits:
    """The limits this process lives under; what could not be read is None and named in ``reason``."""
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
    """Descriptors: a limit on each process alone, so ``used`` means something for a named process only."""
    if process is None:
        reason = say("the limit is each process's own; no process was named")
        if limits.nofile_soft is None:
            reason = limits.reason or reason
        return Pool("fds", limits.nofile_soft, None, None, say("RLIMIT_NOFILE, soft"), reason)
    size = limits.nofile_soft if process.fd_limit is None else process.fd_limit
    used = process.fds
    free = None if size is None or used is None else max(0, size - used)
    reason_named = None
    if used is None:
        reason_named = say("the descriptors of process {pid} may not be looked at", pid=process.pid)
    elif size is None:
        reason_named = limits.reason
    return Pool(
        "fds", size, used, free, say("/proc/{pid}/limits and /proc/{pid}/fd", pid=process.pid), reason_named
    )


def pinned_pool(ram: Pool, limits: Limits, pinned: int | None = None) -> Pool:
    """Page-locked memory: as large as what RAM has left; ``pinned`` is the kernel's VmPin, where somebody read it."""
    bound = (
        say(
            "RLIMIT_MEMLOCK is {size}; CUDA's pinned memory is not bounded by it",
            size=format_size(limits.memlock_soft),
        )
        if limits.memlock_soft is not None
        else say("no RLIMIT_MEMLOCK is known to apply")
    )
    # VmPin misses what CUDA pins, so 0 says nothing and more than 0 is a least amount.
    used = pinned or None
    known = (
        say("the kernel has no counter for what CUDA has pinned")
        if used is None
        else say("at least that much (VmPin): what CUDA has pinned is not counted")
    )
    return Pool(
        "pinned",
        ram.size,
        used,
        ram.free,
        say("taken from ram: {source}", source=ram.source),
        joined((known, bound)),
    )


def _pair(host: Host, name: str, reasons: list[str]) -> tuple[int | None, int | None]:
    label = f"RLIMIT_{name.upper()}"
    try:
        pair = host.rlimit(name)
    except (OSError, ValueError, TypeError, IndexError, AttributeError):  # a system or a recording without it
        pair = None
    if pair is None:
        reasons.append(say("{label} cannot be asked for here", label=label))
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
    # Listing the folder takes a descriptor too, which is gone again when the list is there.
    still = sum(
        1 for name in names if host.exists(f"{folder}/{name}") or host.link(f"{folder}/{name}") is not None
    )
    return still or None


def _cannot_list(host: Host) -> str:
    folder = _fd_folder(host)
    return say("{folder} is empty", folder=folder) if host.exists(folder) else host.why(folder)
