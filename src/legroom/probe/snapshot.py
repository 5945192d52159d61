"""Everything that is known about this machine at one moment: ``legroom.snapshot()``."""

from __future__ import annotations

from legroom.probe.environment import environment
from legroom.probe.filesystem import disk_pool, disks
from legroom.probe.gpu_devices import gpu_pools, gpus
from legroom.probe.host import Host
from legroom.probe.limits import cpu, fds_pool, limits, pinned_pool, temporary
from legroom.probe.memory import memory, pressure, ram_pool, read_swap_counters, swap, swap_pool
from legroom.probe.process import processes, with_shm
from legroom.probe.shm import shm, shm_pool
from legroom.records import Box


def snapshot(host: Host | None = None, *, pid: str = "self") -> Box:
    """Everything known about this box now: what ``legroom doctor`` judges.

    Reads only, and needs no rights: what may not be read is unknown, with the reason beside it.

    Args:
        host: Where to read; None is this machine, ``Host(root="/host")`` one that is mounted there or recorded.
        pid: Whose cgroup bounds RAM and CPU.
    """
    host = host or Host()
    counters = read_swap_counters(
        host
    )  # first, so that the other probes' time is the interval of the swap rates
    all_processes = processes(host)
    ram = memory(host, pid)
    bounds = limits(host)
    tmpfs = shm(host, all_processes)
    if tmpfs.used:
        all_processes = with_shm(host, all_processes)
    cards = gpus(host)
    rooms = disks(host)
    swapped = swap(host, ram, counters)
    pools = (
        shm_pool(tmpfs),
        ram_pool(ram),
        swap_pool(swapped),
        pinned_pool(ram_pool(ram), bounds),
        fds_pool(bounds),
        disk_pool(rooms),
        *gpu_pools(cards),
    )
    return Box(
        when=host.now,
        place=environment(host),
        pools=pools,
        shm=tmpfs,
        memory=ram,
        swap=swapped,
        pressure=pressure(host, pid),
        gpus=cards,
        cpu=cpu(host, pid),
        limits=bounds,
        disks=rooms,
        processes=tuple(all_processes),
        temporary=temporary(host, pid),
    )
