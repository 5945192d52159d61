"""Everything that is known about this machine at one moment: ``legroom.snapshot()``."""

from __future__ import annotations

from dataclasses import replace

from legroom.probe.filesystems_and_cgroups import disk_pool, disks
from legroom.probe.gpu_devices import bytes_by_process, gpu_pools, gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import cpu, fds_pool, limits, pinned_pool, processes, temporary, with_shm
from legroom.probe.ram_swap_and_pressure import memory, pressure, ram_pool, read_swap_counters, swap, swap_pool
from legroom.probe.runtime_environment import environment
from legroom.probe.shm import shm, shm_pool
from legroom.records.machine import Machine
from legroom.system.argument_checks import check_arguments


def snapshot(host: Host | None = None, *, pid: str | int = "self") -> Machine:
    """Everything known about this machine now: the input of ``legroom doctor``.

    Only reads, and needs no privileges: what may not be read is unknown, with a reason.

    Args:
        host: Where to read; None is this machine, ``Host(root="/host")`` one that is mounted there or recorded.
        pid: The process whose cgroup limits RAM and CPU.
    """
    if host is not None or pid != "self":
        check_arguments(snapshot, locals())
    host, pid = host or Host(), str(pid)
    counters = read_swap_counters(host)  # first: the other probes' time is the interval for the swap rates
    all_processes = processes(host)
    ram = memory(host, pid)
    bounds = limits(host)
    tmpfs = shm(host, all_processes)
    if tmpfs.used:
        all_processes = with_shm(host, all_processes)
    cards = gpus(host)
    on_gpus = bytes_by_process(cards)
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
    return Machine(
        when=host.now,
        runtime=environment(host),
        pools=pools,
        shm=tmpfs,
        memory=ram,
        swap=swapped,
        pressure=pressure(host, pid),
        gpus=cards,
        cpu=cpu(host, pid),
        limits=bounds,
        disks=rooms,
        processes=tuple(replace(one, gpu=on_gpus[one.pid]) if one.pid in on_gpus else one for one in all_processes),
        temporary=temporary(host, pid),
    )
