"""One moment of one box: every probe asked once.

Covers: putting the probes' answers together (`legroom.snapshot()`). Does not cover: any reading of its own.
"""

from __future__ import annotations

from legroom.model import Box
from legroom.probe.cpu import cpu
from legroom.probe.disk import disk_pool, disks
from legroom.probe.gpu import gpu_pools, gpus
from legroom.probe.host import Host
from legroom.probe.limits import fds_pool, limits, pinned_pool
from legroom.probe.memory import memory, ram_pool
from legroom.probe.place import place
from legroom.probe.pressure import pressure
from legroom.probe.process import processes, with_shm
from legroom.probe.shm import shm, shm_pool
from legroom.probe.swap import start, swap, swap_pool
from legroom.probe.temporary import temporary


def snapshot(host: Host | None = None, *, pid: str = "self") -> Box:
    """Everything known about this box now: what ``legroom doctor`` judges.

    Reads only, and needs no rights: what may not be read is unknown, with the reason beside it.

    Args:
        host: Where to read; None is this machine, ``Host(root="/host")`` one that is mounted there or recorded.
        pid: Whose cgroup bounds RAM and CPU.
    """
    host = host or Host()
    counters = start(host)  # first, so that the other probes' time is the interval of the swap rates
    everybody = processes(host)
    ram = memory(host, pid)
    bounds = limits(host)
    tmpfs = shm(host, everybody)
    if tmpfs.used:
        everybody = with_shm(host, everybody)
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
        place=place(host),
        pools=pools,
        shm=tmpfs,
        memory=ram,
        swap=swapped,
        pressure=pressure(host, pid),
        gpus=cards,
        cpu=cpu(host, pid),
        limits=bounds,
        disks=rooms,
        processes=tuple(everybody),
        temporary=temporary(host, pid),
    )
