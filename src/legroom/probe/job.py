"""One running training job: its processes, what they hold together, the settings on its command line.

Shared memory is counted once: /dev/shm by segment, RAM by PSS. The limit on descriptors is per process, so the job's
figure is that of the process nearest its limit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from legroom.probe.host import Host
from legroom.probe.process import arguments, holdings, matching, our_pid, processes, tree
from legroom.probe.shm import makers_alive, on_its_way
from legroom.probe.shm_segments import Segments, files_below
from legroom.probe.training_flags import Flag, flags
from legroom.records import Job, Process
from legroom.units import format_size
from legroom.words import say

__all__ = ["flags", "job", "jobs"]


def job(host: Host, pid: int) -> Job:
    """The training that is process ``pid``."""
    return _job(host, processes(host), pid)


def jobs(host: Host, pattern: str) -> list[Job]:
    """Every training whose command line the pattern finds; workers belong to their trainer's job."""
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
    # What is gone by now was gone while it was read: half a look is none.
    looked = [process for process in looked if process.pid == pid or host.exists(f"/proc/{process.pid}")]
    seen = segments.seen
    members = [  # again, because a segment's size may have been learnt from a later process
        replace(process, shm=segments.total(seen[process.pid])) if process.pid in seen else process
        for process in looked
    ]
    held = {inode for process in members for inode in seen.get(process.pid, ())}
    held |= _on_their_way(host, segments, members)
    notes: list[str] = []
    sums = {
        "shm": _shm(segments, members, held, notes),
        "ram": _ram(members, notes),
        "swap": _sum([process.swap for process in members]),
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
    """Batches that a worker has sent and that are not fetched yet: no process holds them, the job does."""
    named = {
        file.path.removeprefix(segments.path + "/"): file for file in files_below(host, segments.path).files
    }
    makers = makers_alive(host, named, {process.pid for process in members})
    waiting = [file for name, file in named.items() if on_its_way(file, name, makers)]
    segments.know(waiting)
    return {file.inode for file in waiting}


def _flags(host: Host, members: Sequence[Process]) -> dict[str, Flag]:
    """Those nearest the root: a shell has none, a launcher the ranks alone, its children the rest."""
    found: dict[str, Flag] = {}
    for process in members:
        found = flags(arguments(host, process.pid)) | found
        if found.keys() - {"ranks"}:
            break  # further down are helpers with flags of their own, such as a compiler's -j
    return found


def _shm(segments: Segments, members: Sequence[Process], held: set[int], notes: list[str]) -> int | None:
    total = segments.total(held)
    closed = sum(1 for process in members if process.pid not in segments.seen)
    if closed:
        notes.append(
            say(
                "shm: no permission to read {closed} of {count} processes; the others hold {total}",
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
    return _sum([process.rss if process.pss is None else process.pss for process in members])


def _pinned(members: Sequence[Process], notes: list[str]) -> int | None:
    total = _sum([process.pinned for process in members])
    if total:
        notes.append(say("pinned: memory pinned by cudaHostRegister is not included"))
    return total


def _descriptors(members: Sequence[Process]) -> int | None:
    """Of the process nearest its own limit; where limits are unknown, of the one with most."""
    known = [(process.fds / (process.fd_limit or 1 << 62), process.fds) for process in members if process.fds]
    return max(known)[1] if known else None


def _sum(figures: Sequence[int | None]) -> int | None:
    known = [figure for figure in figures if figure is not None]
    return sum(known) if len(known) == len(figures) else None
