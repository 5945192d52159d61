"""Running training jobs: the processes of each, what they hold together, the settings on its command line.

Shared memory is counted once: /dev/shm by segment, RAM by PSS. The limit on descriptors is per process, so the job's
figure is that of the process nearest its limit.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from legroom.errors import UnreadableProcess
from legroom.messages import joined, listed, say
from legroom.probe.copy_on_write import CopiedMemory, CopyReader
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import arguments, holdings, matching, our_pid, processes, started_at, tree
from legroom.probe.shm import makers_alive, on_its_way
from legroom.probe.shm_segments import Segments, files_below
from legroom.records.loader_settings_and_flags import Flag, training_flags
from legroom.records.machine import Process
from legroom.records.workload import Job
from legroom.units import format_size


def job(host: Host, pid: int) -> Job:
    """The job of process ``pid``."""
    return _job(host, processes(host), pid)


def jobs(host: Host, pattern: str) -> list[Job]:
    """Every job whose command line matches; workers belong to the job of their training process."""
    all_processes = processes(host)
    return [_job(host, all_processes, root.pid) for root in _roots(host, all_processes, pattern)]


def _roots(host: Host, all_processes: Sequence[Process], pattern: str) -> list[Process]:
    """The matching processes that do not descend from a matching process."""
    us = our_pid(host)
    found = matching(all_processes, pattern, us=us if us is not None else 0)
    below = {child.pid for process in found for child in tree(all_processes, process.pid)[1:]}
    return [process for process in found if process.pid not in below]


def _job(host: Host, all_processes: Sequence[Process], pid: int) -> Job:
    segments = Segments.of(host)
    looked = [holdings(host, process, segments) for process in tree(all_processes, pid)]
    # Processes that have ended by now may have been read only in part: leave them out.
    looked = [process for process in looked if process.pid == pid or host.exists(f"/proc/{process.pid}")]
    seen = segments.seen
    members = [  # again, because a later process may have shown a segment's size
        replace(process, shm=segments.total(seen[process.pid])) if process.pid in seen else process
        for process in looked
    ]
    held = {inode for process in members for inode in seen.get(process.pid, ())}
    held |= _on_their_way(host, segments, members)
    notes: list[str] = []
    sums = {
        "shm": _shm(segments, members, held, notes),
        "ram": _ram(members, notes),
        "swap": sum_if_known([process.swap for process in members]),
        "pinned": _pinned(members, notes),
        "fds": _descriptors(members),
    }
    found = _flags(host, members)
    return Job(
        pid=pid,
        command=members[0].command,
        processes=tuple(members),
        flags={name: flag.value for name, flag in found.items()},
        spellings={name: flag.spelling for name, flag in found.items()},
        held=sums,
        notes=tuple(notes),
    )


def _on_their_way(host: Host, segments: Segments, members: Sequence[Process]) -> set[int]:
    """Batches that a worker has sent and no process has received yet: they belong to the job."""
    named = {file.path.removeprefix(segments.path + "/"): file for file in files_below(host, segments.path).files}
    makers = makers_alive(host, named, {process.pid for process in members})
    waiting = [file for name, file in named.items() if on_its_way(file, name, makers)]
    segments.know(waiting)
    return {file.inode for file in waiting}


def _flags(host: Host, members: Sequence[Process]) -> dict[str, Flag]:
    """The flags nearest to the root: a shell has none, a launcher only ranks, its children the rest."""
    found: dict[str, Flag] = {}
    for process in members:
        found = training_flags(arguments(host, process.pid)) | found
        if found.keys() - {"ranks"}:
            break  # further down are helpers with flags of their own, such as a compiler's -j
    return found


def _shm(segments: Segments, members: Sequence[Process], held: set[int], notes: list[str]) -> int | None:
    total = segments.total(held)
    closed = sum(1 for process in members if process.pid not in segments.seen)
    if closed:
        notes.append(
            say(
                "shm: no permission to read {closed} of {count} processes; the others use {total}",
                closed=closed,
                count=len(members),
                total=say("an unknown amount") if total is None else format_size(total),
            )
        )
        return None
    if total is None:
        notes.append(say("shm: cannot read the size of an unlinked segment"))
    return total


def _ram(members: Sequence[Process], notes: list[str]) -> int | None:
    unshared = sum(1 for process in members if process.pss is None)
    if unshared:
        notes.append(
            say(
                "ram: cannot read PSS of {unshared} of {count} processes; their RSS is used, which counts shared "
                "memory once per process",
                unshared=unshared, count=len(members),
            )
        )  # fmt: skip
    return sum_if_known([process.rss if process.pss is None else process.pss for process in members])


def _pinned(members: Sequence[Process], notes: list[str]) -> int | None:
    total = sum_if_known([process.pinned for process in members])
    if total:
        notes.append(say("pinned: memory pinned by cudaHostRegister is not included"))
    return total


def _descriptors(members: Sequence[Process]) -> int | None:
    """Descriptors of the process nearest to its limit; if limits are unknown, of the one with most."""
    known = [(process.fds / (process.fd_limit or 1 << 62), process.fds) for process in members if process.fds]
    return max(known)[1] if known else None


def sum_if_known(figures: Sequence[int | None]) -> int | None:
    """Their sum; None where one of them is unknown."""
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None


_STORE = "/legroom-"  # a store of shared datasets: one copy for any number of jobs


@dataclass(frozen=True, slots=True)
class RunningJobs:
    """Training runs that are active now: the memory of each, and of all together."""

    jobs: tuple[Job, ...]
    shm: tuple[int, ...]  # bytes in /dev/shm that only one job uses
    ram: tuple[int | None, ...]  # private memory of each, workers included
    shared: int  # bytes in /dev/shm that several of them use, or may use

    @property
    def held(self) -> int:
        """All they hold of /dev/shm."""
        return sum(self.shm) + self.shared

    @property
    def each_shm(self) -> int:
        """The mean of one, rounded up."""
        return -(-sum(self.shm) // len(self.shm))

    @property
    def each_ram(self) -> int | None:
        """The mean private memory of one; None where one's could not be read."""
        known = [amount for amount in self.ram if amount is not None]
        return -(-sum(known) // len(known)) if len(known) == len(self.ram) else None


def measure_running_jobs(host: Host, pids: Sequence[int] = (), pattern: str | None = None) -> RunningJobs:
    """The running jobs with these process ids, and those whose command line matches the pattern.

    Shared memory that several of them use is counted once, for all of them together.
    """
    found = {one.pid: one for one in (jobs(host, pattern) if pattern is not None else [])}
    found.update({pid: job(host, pid) for pid in pids})
    members = tuple(found.values())
    for one in members:
        if one.held.get("shm") is None:
            raise _unreadable(one)
    segments, everybodys = _used_by_several(host, members)
    own = []
    for one in members:
        inodes = {inode for process in one.processes for inode in segments.seen.get(process.pid, ())}
        own.append(max(0, (one.held["shm"] or 0) - (segments.total(inodes & everybodys) or 0)))
    used = {inode for inodes in segments.seen.values() for inode in inodes}
    return RunningJobs(
        jobs=members,
        shm=tuple(own),
        ram=tuple(_private_ram(host, one) for one in members),
        shared=segments.total(everybodys & used) or 0,
    )


def _unreadable(one: Job) -> UnreadableProcess:
    """The error for a job whose use of /dev/shm is unknown: whose processes they are, and how many may not be read."""
    others = sorted({process.uid for process in one.processes if process.uid not in (None, os.geteuid())})
    why = list(one.notes[:1])  # that on shm; what else is unknown does not matter
    if others:
        whose = say(
            "uid {owner} runs it, and this command runs as uid {user}",
            owner=listed(map(str, others)),
            user=os.geteuid(),
        )
        why.insert(0, whose)
    return UnreadableProcess(
        say("the memory of process {pid} may not be read", pid=one.pid),
        why=joined(why) or say("no permission to read its memory maps"),
        fix=(
            say("run as the user who started it, or as root"),
            say("or pass the memory of one process: per_process='5.75MB'"),
        ),
    )


def _used_by_several(host: Host, members: Sequence[Job]) -> tuple[Segments, set[int]]:
    """Segments that more than one job uses, and those of a dataset store, which any may use."""
    segments = Segments.of(host)
    listed = files_below(host, segments.path).files
    segments.know(listed)
    holders: Counter[int] = Counter()
    for one in members:
        inodes: set[int] = set()
        for process in one.processes:
            held = segments.of_process(process.pid)
            inodes |= held.inodes if held is not None else set()
        holders.update(inodes)
    stored = {file.inode for file in listed if file.path.startswith(segments.path + _STORE)}
    return segments, stored | {inode for inode, count in holders.items() if count > 1}


def _private_ram(host: Host, one: Job) -> int | None:
    """Anonymous pages by PSS, and pinned memory; /dev/shm is counted for itself.

    Pages of files (libraries, a dataset on disk that is mapped) are one copy for all who map them, and the kernel takes
    them back when it needs to: a second job adds none.
    """
    total = 0
    for process in one.processes:
        anonymous = host.table(f"/proc/{process.pid}/smaps_rollup").get("Pss_Anon")
        if anonymous is None:  # kernels before 5.9: by status, where a forked child's share counts twice
            anonymous = host.table(f"/proc/{process.pid}/status").get("RssAnon")
        if anonymous is None:
            return None
        total += anonymous + (process.pinned or 0)
    return total


_READINGS, _BETWEEN = 4, 1.0  # of the workers of a job, and seconds between them
_MOST_READ = 2  # workers of one parent: they read the same dataset
_YOUNG = 5.0  # seconds after its start in which a worker copies for other reasons
_SHARED = 32 << 20  # bytes a worker must share with its parent to be worth reading


class CopyingWorkers(NamedTuple):
    """What forked workers of one parent copied by reading its memory: points of (seconds, bytes) for those read.

    Where contents may not be compared (``unread`` says why), what they copied by writing is among it.
    """

    parent: int
    workers: int
    points: dict[int, list[tuple[float, int]]]  # by pid
    unread: str | None = None


def copies_over_time(
    host: Host, jobs: Sequence[Job], wait: Callable[[float], None] = time.sleep
) -> list[CopyingWorkers]:
    """Read the forked workers of these jobs a few times. Workers whose pages cannot be read are left out."""
    readers = {}
    for job in jobs:
        for parent, workers in _forked(host, job).items():
            reader = CopyReader(host, parent, compare=True)
            chosen = [one.pid for one in reader.read(workers[:_MOST_READ], 0.0) if (one.shared or 0) >= _SHARED]
            if chosen:
                readers[parent] = reader, CopyingWorkers(parent, len(workers), {pid: [(0.0, 0)] for pid in chosen})
    began = time.monotonic()
    read: dict[int, list[CopiedMemory]] = {parent: [] for parent in readers}
    for _ in range(_READINGS - 1 if readers else 0):
        wait(_BETWEEN)
        for parent, (reader, found) in readers.items():
            read[parent] += reader.read(list(found.points), time.monotonic() - began)
    return [made for parent, (_, found) in readers.items() if (made := _with_points(found, read[parent])).points]


def _with_points(found: CopyingWorkers, read: Sequence[CopiedMemory]) -> CopyingWorkers:
    """With the points of all readings: of what was only read, or if that is unknown of all that was copied."""
    known = [one for one in read if one.copied is not None]
    unread = next((one.reason for one in known if one.only_read is None), None)
    points = {pid: list(first) for pid, first in found.points.items() if any(one.pid == pid for one in known)}
    for one in known:
        points[one.pid].append((one.until, (one.only_read if unread is None else one.copied) or 0))
    return found._replace(points=points, unread=unread)


def _forked(host: Host, job: Job) -> dict[int, list[int]]:
    """By parent, its children that were forked and not executed: they have its command line."""
    by_pid = {process.pid: process for process in job.processes}
    found: dict[int, list[int]] = {}
    for process in job.processes:
        parent = by_pid.get(process.parent)
        started = started_at(host, process.pid)
        old = started is not None and host.now - started >= _YOUNG
        if parent is not None and old and process.command == parent.command:
            found.setdefault(parent.pid, []).append(process.pid)
    return found
