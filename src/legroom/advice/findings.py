"""Findings about the machine as a whole, most dangerous first: `findings` runs every rule.

A rule is a generator from a machine to findings; it yields nothing where its figures are unknown.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

from legroom.advice import findings_ram, findings_shm
from legroom.advice.remedies import free_disk, raise_nofile, shorten_temporary, stop_spilling
from legroom.records import Box, Finding, Gpu
from legroom.units import format_size
from legroom.words import counted, joined, listed, phrase, say

FDS_COMFORT = 4096
FDS_LOW = 1024
DISK_LOW = 2 << 30
DISK_OUT = 256 << 20


def descriptors(box: Box) -> Iterator[Finding]:
    """torch's default sharing strategy holds one descriptor for every tensor in flight or kept."""
    soft, hard = box.limits.nofile_soft, box.limits.nofile_hard
    if soft is None or soft < 0 or soft >= FDS_COMFORT:
        return
    yield Finding(
        "fds-low",
        "warning" if soft < FDS_LOW else "info",
        say("a process may open {soft} files", soft=soft),
        say(
            "each tensor from a DataLoader worker holds a descriptor while it lives (sharing strategy "
            "file_descriptor): a consumer that keeps batches dies of 'Too many open files' or 'received 0 items of "
            "ancdata' after about {soft} tensors",
            soft=soft,
        ),
        raise_nofile(box.place, soft, hard),
    )


def disk(box: Box) -> Iterator[Finding]:
    """Checkpoints and disk-backed data need room."""
    for disk in box.disks:
        if disk.free is None or disk.free >= DISK_LOW:
            continue
        role = say("the working directory") if disk.role == "work" else say("the dataset store's place")
        yield Finding(
            "disk-low",
            "critical" if disk.free < DISK_OUT else "warning",
            say("{free} left on the disk of {role}", free=format_size(disk.free), role=role),
            say(
                "{path} ({kind}) has {free} of {size} free; a checkpoint that does not fit is a training lost",
                path=disk.path,
                kind=disk.filesystem or say("filesystem unknown"),
                free=format_size(disk.free),
                size=say("an unknown size") if disk.size is None else format_size(disk.size),
            ),
            free_disk(disk.path),
        )


def cpu_quota(box: Box) -> Iterator[Finding]:
    """os.cpu_count() and the affinity promise more than the quota gives."""
    affinity, quota = box.cpu.affinity, box.cpu.quota
    if affinity is None or quota is None or quota >= affinity:
        return
    cores = max(1, int(quota))
    yield Finding(
        "cpu-quota-below-affinity",
        "info",
        say(
            "{quota:g} cores' worth of time, though {affinity} CPUs show",
            quota=round(quota, 2),
            affinity=affinity,
        ),
        say(
            "the cgroup's CPU quota ({source}) stops all threads together when it is used up; libraries that start "
            "{affinity} threads and loaders with as many workers wait for one another",
            source=box.cpu.source,
            affinity=affinity,
        ),
        (
            say("at most {cores} DataLoader workers; OMP_NUM_THREADS={cores}", cores=cores),
            say("check: the nr_throttled count in cpu.stat of the cgroup stands still"),
        ),
    )


def sockets(box: Box) -> Iterator[Finding]:
    """Batches go through sockets below the folder for temporary files, and a socket's path is bounded."""
    folder = box.temporary
    if folder is None or folder.socket <= folder.longest:
        return
    length = len(os.fsencode(folder.path))
    yield Finding(
        "tmpdir-too-long",
        "critical",
        say(
            "{name} is {length} bytes long: torch's data loaders with workers wait for ever here",
            name=folder.source,
            length=length,
        ),
        say(
            "workers hand batches over through a socket below it, whose path would take {socket} bytes of {longest}: "
            "each batch is lost with 'AF_UNIX path too long', and with forkserver the workers do not start "
            "({path})",
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


def nearly_full(box: Box) -> Iterator[Finding]:
    """Little left on a card."""
    for card in box.gpus.cards:
        if card.size is None or card.used is None or card.free is None or card.used < NEARLY_FULL * card.size:
            continue
        yield Finding(
            "gpu-nearly-full",
            "critical" if card.used >= FULL * card.size else "warning",
            say(
                "gpu{index} has {free} of {size} left",
                index=card.index, free=format_size(card.free), size=format_size(card.size),
            ),
            _in_use(card, format_size(card.used)),
            (
                say("smaller batches with more accumulation keep the effective batch; mixed precision needs less"),
                say("end what should not run there, by the pids above"),
                say("check:\nnvidia-smi"),
            ),
        )  # fmt: skip


def _in_use(card: Gpu, used: str) -> str:
    if card.processes is None:
        return say("{used} in use; by whom is unknown ({reason})", used=used, reason=card.reason or "")
    known = sorted((p for p in card.processes if p.used is not None), key=lambda p: -(p.used or 0))
    if not known:
        return say("{used} in use", used=used)
    hidden = sum(1 for p in card.processes if p.command is None)
    text = listed(f"{p.pid} {format_size(p.used or 0)}" for p in known[:3])
    told = say("{used} in use (largest: {text})", used=used, text=text)
    if not hidden:
        return told
    unseen = say("{count} of the pids belong to processes that cannot be seen from here", count=hidden)
    return joined((told, unseen))


def unseen(box: Box) -> Iterator[Finding]:
    """A card on the bus, or a driver, that does not answer."""
    gpus = box.gpus
    dead = [card for card in gpus.cards if card.size is None]
    if dead:
        yield Finding(
            "gpu-unseen",
            "warning",
            say("gpu{index} gives no memory figures", index=dead[0].index),
            dead[0].reason or say("the driver gave no reason"),
            (
                say("see the kernel's log for Xid errors:\ndmesg | grep -i xid"),
                say("check:\nnvidia-smi -q -d MEMORY"),
            ),
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
            if box.place.kind in ("docker", "podman", "container")
            else say("in kubernetes: ask for nvidia.com/gpu in resources.limits")
            if box.place.kind == "kubernetes"
            else say(
                "install or reload the NVIDIA driver; after an upgrade a reboot joins library and module again"
            ),
            say("check:\nnvidia-smi"),
        ),
    )


def spilling(box: Box) -> Iterator[Finding]:
    """Windows moves GPU memory into the host's RAM when a card is full."""
    for card in box.gpus.cards:
        # Pinned buffers and the desktop keep some there on a healthy machine; on a full card it is a spill.
        full = card.size is None or card.used is None or card.used >= SPILLS_FROM * card.size
        if not card.spilled or card.spilled < SPILL_FLOOR or not full:
            continue
        yield Finding(
            "gpu-spilling",
            "critical",
            say("{spilled} of GPU memory lies in the host's RAM", spilled=format_size(card.spilled)),
            say(
                "gpu{index} holds {used} of {size}, and Windows keeps the rest across the PCIe bus: training slows "
                "down and no error says so",
                index=card.index,
                used=say("an unknown amount") if card.used is None else format_size(card.used),
                size=say("an unknown size") if card.size is None else format_size(card.size),
            ),
            stop_spilling(),
        )


GPU_RULES = (nearly_full, unseen, spilling)


_ORDER = {"critical": 0, "warning": 1, "info": 2}

Rule = Callable[[Box], Iterator[Finding]]
RULES: tuple[Rule, ...] = (*findings_shm.SHM_RULES, *findings_ram.RAM_RULES, *GPU_RULES, *MACHINE_RULES)


def findings(box: Box) -> tuple[Finding, ...]:
    """Everything worth saying about the box, most dangerous first; equals stay in the rules' order."""
    said = [finding for rule in RULES for finding in rule(box)]
    return tuple(sorted(said, key=lambda finding: _ORDER[finding.severity]))
