"""``legroom.available``: bytes that can be taken now from a memory pool, under every limit.

A stable function for other libraries: it takes less than a millisecond for ``ram`` and ``shm``, and imports neither
numpy nor torch. What is free is what docs/decisions/0005-ram-pool.md says: swap is not counted, and page cache
that the kernel can drop counts as free.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from legroom.errors import UsageError
from legroom.messages import say
from legroom.probe.filesystems_and_cgroups import Cgroup, cgroup
from legroom.probe.host_files_and_syscalls import UNLIMITED, Host
from legroom.probe.ram_swap_and_pressure import memory, memory_in, ram_bounds, ram_pool
from legroom.probe.shm import shm_space
from legroom.probe.shm_segments import SHM
from legroom.records.machine import Available
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import import_lock
from legroom.units import format_size

_REMEMBERED = 10.0  # seconds for which the place of a cgroup is not looked up again


def available(pool: str = "ram") -> Available:
    """Bytes that this process can take now from a memory pool before a limit refuses it or gets it killed.

    ``bytes`` is None if it is unknown; ``why`` is the limit that decides, or the reason. ``int()`` gives the bytes.
    Other processes take memory at the same time: leave a margin.

    Args:
        pool: ``"ram"``: the machine's available memory, every cgroup limit above this process, ``ulimit -v`` and
            ``ulimit -d``, and the commit limit where ``vm.overcommit_memory`` is 2. ``"shm"``: space in /dev/shm, whose
            pages also count as RAM. ``"gpu0"``, ``"gpu1"``, …: a GPU by nvidia-smi's index; this takes some
            milliseconds.
    """
    check_arguments(available, locals())
    return available_on(Host(), pool)


def available_on(host: Host, pool: str) -> Available:
    """The same for any host."""
    if pool == "ram":
        return _ram(host)
    if pool == "shm":
        return _shm(host)
    if pool.startswith("gpu") and pool[3:].isdecimal():
        return _gpu(host, pool)
    raise UsageError(
        say("unknown resource {pool!r}", pool=pool),
        why=say("valid values: {all}", all="ram, shm, gpu0, gpu1, …"),
        fix=("legroom.available('ram')",),
    )


def _ram(host: Host) -> Available:
    read = memory_in(host, _group(host)) if host.platform == "linux" else memory(host)
    whole = ram_pool(read)
    if whole.free is None:
        return Available("ram", None, whole.reason or whole.source)
    tight = min((bound for bound in ram_bounds(read) if bound.room is not None), key=lambda bound: bound.room or 0)
    size = say("unknown") if tight.size is None else format_size(tight.size)
    why = say("{source}: {free} of {size} left", source=tight.room_from, free=format_size(whole.free), size=size)
    found = [(max(0, whole.free), why), *_of_this_process(host)]
    return Available("ram", *min(found))


def _of_this_process(host: Host) -> Iterator[tuple[int, str]]:
    """What ulimit and a strict commit limit leave. They make an allocation fail; they kill no process."""
    for name, line, option in (("as", "VmSize", "-v"), ("data", "VmData", "-d")):
        pair = host.rlimit(name)
        if pair is None or pair[0] == UNLIMITED:
            continue
        used = host.table("/proc/self/status").get(line)
        if used is not None:
            why = say("ulimit {option}: {used} of {limit} used",
                      option=option, used=format_size(used), limit=format_size(pair[0]))  # fmt: skip
            yield max(0, pair[0] - used), why
    if host.number("/proc/sys/vm/overcommit_memory") == 2:
        info = host.table("/proc/meminfo")
        limit, used = info.get("CommitLimit"), info.get("Committed_AS")
        if limit is not None and used is not None:
            why = say("vm.overcommit_memory=2: {used} of {limit} committed",
                      used=format_size(used), limit=format_size(limit))  # fmt: skip
            yield max(0, limit - used), why


def _shm(host: Host) -> Available:
    space, ram = shm_space(host, SHM), _ram(host)
    if space.free is None and space.reason and host.disk_space(SHM) is None:
        return Available("shm", None, space.reason)
    if space.free is None or (ram.bytes is not None and ram.bytes < space.free):
        return Available("shm", ram.bytes, ram.why)
    size = format_size(space.size or 0)
    return Available("shm", space.free, say("{path}: {free} of {size} free",
                                            path=SHM, free=format_size(space.free), size=size))  # fmt: skip


def _gpu(host: Host, pool: str) -> Available:
    with import_lock:
        from legroom.probe.gpu_devices import gpus  # imports NVML's bindings

    found = gpus(host)
    for gpu in found.cards:
        if f"gpu{gpu.index}" == pool:
            if gpu.free is None:
                return Available(pool, None, gpu.reason or found.source)
            size = format_size(gpu.size or 0)
            why = say("{name}: {free} of {size} free", name=gpu.name, free=format_size(gpu.free), size=size)
            return Available(pool, gpu.free, why)
    return Available(pool, None, found.reason or say("there is no GPU with index {index}", index=pool[3:]))


# This process's cgroup, what /proc said of it, and until when: looking it up takes longer than reading it.
_remembered: tuple[Cgroup, str | None, float] | None = None


def _group(host: Host) -> Cgroup:
    global _remembered
    if not host.live or str(host.root) != "/":
        return cgroup(host, "memory")
    membership, now, kept = host.text("/proc/self/cgroup"), time.monotonic(), _remembered
    if kept is None or membership != kept[1] or now > kept[2]:
        kept = _remembered = cgroup(host, "memory"), membership, now + _REMEMBERED
    return kept[0]
