"""Findings about the machine, most severe first: `findings` runs every rule. Those about /dev/shm are in findings_shm.

A rule is a generator that takes a machine and yields findings; it yields nothing if its figures are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from legroom.advice import findings_shm
from legroom.advice.fix_commands import (
    ask_above,
    free_disk,
    raise_nofile,
    raise_ram_limit,
    settle_swap,
    shell_word,
    shorten_temporary,
    stop_spilling,
)
from legroom.messages import counted, joined, listed, phrase, say
from legroom.records.finding_and_alarm import Finding
from legroom.records.machine import Gpu, Machine, Pressure, scope_name
from legroom.units import format_size

FDS_COMFORT = 4096
FDS_LOW = 1024
DISK_LOW = 2 << 30
DISK_OUT = 256 << 20
NEAR = 0.10  # share of RAM that is free
AT_THE_EDGE = 0.03
MOVING = 64 << 10  # bytes per second: less is a stray page, not a working set that does not fit
STALL = 10.0  # per cent of time in which some task waited for memory
HARD_STALL = 10.0  # per cent of time in which every task did


def descriptors(machine: Machine) -> Iterator[Finding]:
    """torch's default sharing strategy uses one descriptor for every tensor in flight or kept."""
    soft, hard = machine.limits.nofile_soft, machine.limits.nofile_hard
    if soft is None or soft < 0 or soft >= FDS_COMFORT:
        return
    yield Finding(
        "fds-low",
        "warning" if soft < FDS_LOW else "info",
        say("the limit is {soft} open files per process", soft=soft),
        say(
            "each tensor from a DataLoader worker uses a file descriptor until it is freed (sharing "
            "strategy file_descriptor). A script that keeps batches fails after about {soft} tensors "
            "with 'Too many open files' or 'received 0 items of ancdata'",
            soft=soft,
        ),
        raise_nofile(machine.runtime, soft, hard),
    )


def disk(machine: Machine) -> Iterator[Finding]:
    """Checkpoints and disk-backed data need disk space."""
    for disk in machine.disks:
        if disk.free is None or disk.free >= DISK_LOW:
            continue
        role = say("the working directory") if disk.role == "work" else say("the dataset cache")
        yield Finding(
            "disk-low",
            "critical" if disk.free < DISK_OUT else "warning",
            say("{free} free on the disk of {role}", free=format_size(disk.free), role=role),
            say(
                "{path} ({kind}) has {free} of {size} free; a checkpoint that does not fit cannot be saved",
                path=disk.path,
                kind=disk.filesystem or say("filesystem unknown"),
                free=format_size(disk.free),
                size=say("an unknown size") if disk.size is None else format_size(disk.size),
            ),
            free_disk(disk.path),
        )


def cpu_quota(machine: Machine) -> Iterator[Finding]:
    """os.cpu_count() and the CPU affinity ignore the cgroup's quota."""
    affinity, quota = machine.cpu.affinity, machine.cpu.quota
    if affinity is None or quota is None or quota >= affinity:
        return
    cores = max(1, int(quota))
    yield Finding(
        "cpu-quota-below-affinity",
        "info",
        say(
            "the CPU quota is {quota:g} cores, but {affinity} CPUs are visible",
            quota=round(quota, 2),
            affinity=affinity,
        ),
        say(
            "when the cgroup's CPU quota ({source}) is used up, all threads are throttled. Libraries "
            "that start {affinity} threads, or DataLoaders with as many workers, slow each other down",
            source=machine.cpu.source,
            affinity=affinity,
        ),
        (
            say("use at most {cores} DataLoader workers, and set OMP_NUM_THREADS={cores}", cores=cores),
            say("check: nr_throttled in the cgroup's cpu.stat no longer grows"),
        ),
    )


def sockets(machine: Machine) -> Iterator[Finding]:
    """Batches go through sockets in the temporary directory, and the length of a socket's path is limited."""
    folder = machine.temporary
    if folder is None or folder.socket <= folder.longest:
        return
    length = len(os.fsencode(folder.path))
    yield Finding(
        "tmpdir-too-long",
        "critical",
        say("{name} is {length} bytes long: multi-worker torch DataLoaders hang", name=folder.source, length=length),
        say(
            "workers send batches through a socket in {path}. Its path would be {socket} bytes long, the "
            "limit is {longest}: every batch fails with 'AF_UNIX path too long', and with forkserver no "
            "worker starts",
            socket=folder.socket,
            longest=folder.longest,
            path=folder.path,
        ),
        shorten_temporary(folder.source, length - (folder.socket - folder.longest)),
    )


MACHINE_RULES = (descriptors, disk, cpu_quota, sockets)


NEARLY_FULL = 0.90
FULL = 0.97
SPILLS_FROM = 0.85
SPILL_FLOOR = 256 << 20


def nearly_full(machine: Machine) -> Iterator[Finding]:
    """Little GPU memory left."""
    for card in machine.gpus.cards:
        if card.size is None or card.used is None or card.free is None or card.used < NEARLY_FULL * card.size:
            continue
        yield Finding(
            "gpu-nearly-full",
            "critical" if card.used >= FULL * card.size else "warning",
            say(
                "gpu{index} has {free} of {size} free",
                index=card.index, free=format_size(card.free), size=format_size(card.size),
            ),
            _in_use(card, format_size(card.used)),
            (
                say("use a smaller batch with more gradient accumulation (same effective batch size), or "
                    "mixed precision"),
                say("stop processes that should not use this GPU (pids above)"),
                say("check:\nnvidia-smi"),
            ),
        )  # fmt: skip


def _in_use(card: Gpu, used: str) -> str:
    if card.processes is None:
        return say("{used} in use; processes unknown ({reason})", used=used, reason=card.reason or "")
    known = sorted((p for p in card.processes if p.used is not None), key=lambda p: -(p.used or 0))
    if not known:
        return say("{used} in use", used=used)
    hidden = sum(1 for p in card.processes if p.command is None)
    text = listed(f"{p.pid} {format_size(p.used or 0)}" for p in known[:3])
    told = say("{used} in use (largest: {text})", used=used, text=text)
    if not hidden:
        return told
    unseen = say("{count} of the pids are not visible from here", count=hidden)
    return joined((told, unseen))


def unseen(machine: Machine) -> Iterator[Finding]:
    """A GPU on the bus, or a driver, that does not answer."""
    gpus = machine.gpus
    dead = [card for card in gpus.cards if card.size is None]
    if dead:
        yield Finding(
            "gpu-unseen",
            "warning",
            say("gpu{index} does not report its memory", index=dead[0].index),
            dead[0].reason or say("the driver gave no reason"),
            (say("see the kernel's log for Xid errors:\ndmesg | grep -i xid"), say("check:\nnvidia-smi -q -d MEMORY")),
        )
    if gpus.cards or not gpus.on_bus:
        return
    yield Finding(
        "gpu-unseen",
        "warning",
        counted(
            gpus.on_bus,
            phrase("{count} NVIDIA GPU on the bus, not usable"),
            phrase("{count} NVIDIA GPUs on the bus, none usable"),
        ),
        gpus.reason or say("the driver did not answer"),
        (
            say("in a container, with the NVIDIA container toolkit on the host:\ndocker run --gpus all …")
            if machine.runtime.kind in ("docker", "podman", "container")
            else say("in Kubernetes, request nvidia.com/gpu in resources.limits")
            if machine.runtime.kind == "kubernetes"
            else say("install or reload the NVIDIA driver; after a driver upgrade, reboot to match driver and library"),
            say("check:\nnvidia-smi"),
        ),
    )


def spilling(machine: Machine) -> Iterator[Finding]:
    """Windows moves GPU memory into the host's RAM when a GPU is full."""
    for card in machine.gpus.cards:
        # Pinned buffers and the desktop keep some there on a healthy machine; on a full GPU it is a spill.
        full = card.size is None or card.used is None or card.used >= SPILLS_FROM * card.size
        if not card.spilled or card.spilled < SPILL_FLOOR or not full:
            continue
        yield Finding(
            "gpu-spilling",
            "critical",
            say("{spilled} of GPU memory has spilled into host RAM", spilled=format_size(card.spilled)),
            say(
                "gpu{index} uses {used} of {size}. Windows keeps the rest in host RAM, across the PCIe "
                "bus: training slows down without an error",
                index=card.index,
                used=say("an unknown amount") if card.used is None else format_size(card.used),
                size=say("an unknown size") if card.size is None else format_size(card.size),
            ),
            stop_spilling(),
        )


GPU_RULES = (nearly_full, unseen, spilling)


def near_limit(machine: Machine) -> Iterator[Finding]:
    """Little RAM left below the effective limit."""
    ram = machine.pool("ram")
    if ram is None or ram.size is None or ram.free is None or ram.free >= NEAR * ram.size:
        return
    yield Finding(
        "ram-near-limit",
        "critical" if ram.free < AT_THE_EDGE * ram.size else "warning",
        say("{free} of {size} RAM free", free=format_size(ram.free), size=format_size(ram.size)),
        say(
            "{used} cannot be reclaimed ({source}); at the limit the OOM killer kills a process",
            used=say("an unknown amount") if ram.used is None else format_size(ram.used),
            source=ram.source,
        ),
        raise_ram_limit(machine.runtime, machine.ram_limit, machine.memory.total),
    )


def throttled(machine: Machine) -> Iterator[Finding]:
    """Above memory.high the kernel throttles allocations; it does not kill."""
    for level in machine.memory.levels:
        if level.high is None or level.usage is None or level.usage < level.high:
            continue
        yield Finding(
            "ram-throttled",
            "warning",
            say(
                "the kernel throttles this cgroup: its memory use is above memory.high ({high})",
                high=format_size(level.high),
            ),
            say(
                "memory.high of {path} is {high}, {usage} in use; times throttled: {count}",
                path=level.path,
                high=format_size(level.high),
                usage=format_size(level.usage),
                count=say("unknown") if machine.memory.events.throttled is None else machine.memory.events.throttled,
            ),
            (
                *raise_ram_limit(machine.runtime, level.high, machine.memory.total)[:-1],
                say("or raise memory.high (systemd: MemoryHigh=)"),
                say("check:\ncat {path}", path=shell_word(f"{level.path}/memory.events")),
            ),
        )
        return


def oom_kills(machine: Machine) -> Iterator[Finding]:
    """The kernel counts its OOM kills, so dmesg is not needed."""
    events = machine.memory.events
    if not events.oom_kills:
        return
    ours = events.scope == "cgroup"
    yield Finding(
        "oom-kills-seen",
        "warning" if ours else "info",
        counted(
            events.oom_kills,
            phrase("the OOM killer killed {count} process in this cgroup")
            if ours
            else phrase("the OOM killer killed {count} process on this machine"),
            phrase("the OOM killer killed {count} processes in this cgroup")
            if ours
            else phrase("the OOM killer killed {count} processes on this machine"),
        ),
        say(
            "counted by the kernel in {source}; times the limit was hit: {count}"
            if events.at_limit
            else "counted by the kernel in {source}",
            source=events.source,
            count=events.at_limit,
        ),
        raise_ram_limit(machine.runtime, machine.ram_limit if ours else None, machine.memory.total),
    )


def swap_in_use(machine: Machine) -> Iterator[Finding]:
    """Swap in use is harmless; swap traffic slows training down."""
    swap = machine.swap
    if not swap.used:
        return
    in_rate, out_rate = swap.in_rate, swap.out_rate
    rates_known = in_rate is not None and out_rate is not None
    moving = rates_known and (in_rate or 0) + (out_rate or 0) >= MOVING
    if not rates_known:
        state = say("current traffic unknown ({reason})", reason=swap.reason or swap.source)
    elif moving:
        state = say(
            "swapping now: {inn}/s in, {out}/s out",
            inn=format_size(int(in_rate or 0)), out=format_size(int(out_rate or 0)),
        )  # fmt: skip
    else:
        state = say("not swapping now")
    used = format_size(swap.used)
    yield Finding(
        "swap-in-use",
        "critical" if moving else "info",
        say("{used} in swap, {state}", used=used, state=state),
        say(
            "{used} of {total} swap is used. A swapped-out page costs nothing until it is accessed; then "
            "it is read from disk",
            used=used,
            total=say("an unknown amount of") if swap.total is None else format_size(swap.total),
        ),
        settle_swap(machine.runtime, moving, used=swap.used, free=machine.memory.available),
    )


def pressure(machine: Machine) -> Iterator[Finding]:
    """PSI: the share of time in which tasks waited for memory."""
    worst: Pressure | None = max(machine.pressure, key=lambda p: (p.full_avg10, p.some_avg10), default=None)
    if worst is None or (worst.full_avg10 < HARD_STALL and worst.some_avg10 < STALL):
        return
    yield Finding(
        "memory-pressure",
        "critical" if worst.full_avg10 >= HARD_STALL else "warning",
        say(
            "memory pressure: tasks in this {scope} stall {some:.0f}% of the time",
            scope=scope_name(worst.scope),
            some=worst.some_avg10,
        ),
        say(
            "over the last 10 s, at least one task stalled {some:.1f}% of the time, all tasks "
            "{full:.1f}% ({source})",
            some=worst.some_avg10, full=worst.full_avg10, source=worst.source,
        ),
        (
            say("reduce the working set: fewer workers, lower prefetch, one shared copy of the data"),
            say("check:\ncat {path}", path=shell_word(worst.source)),
        ),
    )  # fmt: skip


def below_host(machine: Machine) -> Iterator[Finding]:
    """free, psutil and most scripts show the machine's RAM and ignore the cgroup's limit."""
    ram, total = machine.pool("ram"), machine.memory.total
    if ram is None or ram.size is None or total is None or ram.size >= total:
        return
    yield Finding(
        "cgroup-below-host",
        "info",
        say(
            "the RAM limit here is {size}; the machine has {total}",
            size=format_size(ram.size),
            total=format_size(total),
        ),
        say(
            "the cgroup sets the limit ({source}); free and psutil show the machine's {total} and ignore it",
            source=ram.source,
            total=format_size(total),
        ),
        (say("choose batch size and workers for {size}, not for what free prints", size=format_size(ram.size)),),
    )


def above_unknown(machine: Machine) -> Iterator[Finding]:
    """Limits of parent cgroups are not visible from inside a cgroup namespace."""
    if not machine.memory.above_hidden:
        return
    yield Finding(
        "above-cgroup-root-unknown",
        "info",
        say("memory limits above this container's cgroup are not visible from inside"),
        say(
            "the topmost visible cgroup is not the machine's root. A lower limit of the pod or slice "
            "above it may trigger the OOM killer before any limit shown here"
        ),
        ask_above(machine.runtime),
    )


RAM_RULES = (near_limit, throttled, oom_kills, swap_in_use, pressure, below_host, above_unknown)


_ORDER = {"critical": 0, "warning": 1, "info": 2}

Rule = Callable[[Machine], Iterator[Finding]]
RULES: tuple[Rule, ...] = (*findings_shm.SHM_RULES, *RAM_RULES, *GPU_RULES, *MACHINE_RULES)


def findings(machine: Machine) -> tuple[Finding, ...]:
    """All findings about this machine, most severe first; equals stay in the rules' order."""
    said = [finding for rule in RULES for finding in rule(machine)]
    return tuple(sorted(said, key=lambda finding: _ORDER[finding.severity]))
