"""What running trainings hold, as a measure for more of their kind.

Covers: /dev/shm by blocks, what several trainings share counted once, private memory by PSS, and why RssShmem says
more. Does not cover: reading /proc (probe), extrapolating (plan.py).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from legroom.errors import NoSuchProcess
from legroom.model import Job
from legroom.probe.host import Host
from legroom.probe.job import job, jobs
from legroom.probe.shm_segments import Segments, files_below
from legroom.words import joined, say

_STORE = "/legroom-"  # a store of shared datasets: one copy for any number of trainings


@dataclass(frozen=True, slots=True)
class Running:
    """Trainings that run now: each one's own share, and what they hold together."""

    jobs: tuple[Job, ...]
    shm: tuple[int, ...]  # bytes in /dev/shm that are one training's own
    ram: tuple[int | None, ...]  # private memory of each, workers included
    shared: int  # bytes in /dev/shm that several of them use, or may use
    rss_shmem: tuple[int | None, ...]

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

    @property
    def each_rss_shmem(self) -> int | None:
        """What RssShmem would have told of one."""
        known = [amount for amount in self.rss_shmem if amount is not None]
        return -(-sum(known) // len(known)) if len(known) == len(self.rss_shmem) else None


def running(host: Host, pids: Sequence[int] = (), pattern: str | None = None) -> Running:
    """The trainings with those process ids, and those whose command line the pattern finds."""
    found = {one.pid: one for one in (jobs(host, pattern) if pattern is not None else [])}
    found.update({pid: job(host, pid) for pid in pids})
    members = tuple(found.values())
    for one in members:
        if one.held.get("shm") is None:
            raise NoSuchProcess(
                say("process {pid} cannot be measured", pid=one.pid),
                why=joined(one.notes) or say("its maps may not be read"),
                fix=(
                    say("run as the user who started it, or as root"),
                    say("or state what one process takes: --per-process 5.75MB"),
                ),
            )
    segments, everybodys = _shared(host, members)
    own = []
    for one in members:
        inodes = {inode for process in one.processes for inode in segments.seen.get(process.pid, ())}
        own.append(max(0, (one.held["shm"] or 0) - (segments.total(inodes & everybodys) or 0)))
    used = {inode for inodes in segments.seen.values() for inode in inodes}
    return Running(
        jobs=members,
        shm=tuple(own),
        ram=tuple(_private(host, one) for one in members),
        shared=segments.total(everybodys & used) or 0,
        rss_shmem=tuple(_sum([process.rss_shmem for process in one.processes]) for one in members),
    )


def _shared(host: Host, members: Sequence[Job]) -> tuple[Segments, set[int]]:
    """Segments that more than one training holds, and those of a dataset store, which any may hold."""
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


def _private(host: Host, one: Job) -> int | None:
    """Anonymous pages by PSS, and pinned memory; /dev/shm is counted for itself.

    Pages of files (libraries, a dataset on disk that is mapped) are one copy for all who map them, and the kernel takes
    them back when it needs to: a second training brings no more of them.
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


def _sum(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
