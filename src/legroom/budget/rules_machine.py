"""Rules about the rest of the machine: descriptors, disk, CPU quota, sockets.

Covers: limits that end or slow a training and are no memory themselves. Does not cover: the memories.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

from legroom.budget.remedy import free_disk, raise_nofile, shorten_temporary
from legroom.model import Box, Finding
from legroom.units import format_size
from legroom.words import say

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


RULES = (descriptors, disk, cpu_quota, sockets)
