"""Files of a job in /dev/shm: which they are, whether the job hangs because it is full, and the removal of leftovers.

Other jobs of the same user have files there too, under names that do not show whose they are, and a file that no
process uses may be on its way from one process to another. So a file counts as the job's only if one of its processes
was seen to use it, or is named in it: torch writes its creator's pid into the name. In a container that pid alone
proves nothing, because another container with the same /dev/shm has the same pids. A file that appears and loses its
users between two samples may stay; `legroom doctor` lists it.

A job that hangs waits for a batch that did not fit. A torch >= 2.10 worker whose queue thread cannot get shared memory
prints a traceback, drops the batch and continues. The trainer waits for that batch forever. No process exits, so no
exit status shows it. Healthy jobs also wait for minutes, for a peer or a disk. A job counts as hanging only if all of
these hold: its DataLoader workers are alive; its own processes hold about half of /dev/shm or more (63 to 99 % measured
with batches of 9 to 40 MB in 64 MB), or have a segment open without pages that is larger than what is free; and the
allocation error is near the end of its output. job_sampling.py measures for how long a job has been idle.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.runtime_environment import in_initial_namespace
from legroom.probe.shm import kind_of, maker_of, shm
from legroom.probe.shm_segments import SHM, Segments, file_at
from legroom.records.failure import Level, LogFacts
from legroom.rescue.find_failures_in_log import WINDOW

_SHARE = 0.02  # of one core, for looking at new files
_AGAIN = 1.0  # seconds until files without a known user are looked up again


class JobShmFiles:
    """The files in /dev/shm that a job was seen to use."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._before = frozenset(host.names(SHM))
        self._pids_are_unique = bool(in_initial_namespace(host, "pid"))
        self._segments: Segments | None = None
        self._processes: set[int] = set()  # all that the job has had
        self._used: set[str] = set()
        self._others: set[str] = set()  # looked up, and used by none of the job's processes so far
        self._next = self._again = clock()

    def add_processes(self, pids: Iterable[int]) -> None:
        """Add processes of the job."""
        self._processes.update(pids)

    def update(self, pids: Callable[[], Sequence[int]]) -> None:
        """Look up the users of files that are new; ``pids`` are the job's processes."""
        began = self._clock()
        if began < self._next:
            return
        if began >= self._again:
            self._again = began + _AGAIN
            self._others.clear()
        names = self._new_names()
        self._used &= names
        unknown = names - self._used - self._others
        if unknown:
            present = pids()
            self.add_processes(present)
            self._used |= self._held(unknown, present)
            self._others |= unknown - self._used
        self._next = self._clock() + (self._clock() - began) / _SHARE

    def remove(self) -> int:
        """Remove those of them that no process uses, after the job's processes have ended; the bytes freed."""
        named = {name for name in self._new_names() if self._names_a_process(name)}
        freed = 0
        if not named and not self._used & self._new_names():
            return freed
        for file in shm(self._host).files:
            if file.owner != self._host.uid or file.mapped:
                continue
            # Whether torch's file is used can be unknown while another job's manager runs: the name tells.
            if file.name in named or (file.name in self._used and file.mapped is False):
                with contextlib.suppress(OSError):
                    os.unlink(self._host.path(f"{SHM}/{file.name}"))
                    freed += file.size
        return freed

    def _new_names(self) -> set[str]:
        """Files of torch and Python that were not there before the job."""
        names = set(self._host.names(SHM)) - self._before
        return {name for name in names if maker_of(name) is not None or kind_of(name) == "python"}

    def _names_a_process(self, name: str) -> bool:
        return self._pids_are_unique and maker_of(name) in self._processes

    def _held(self, names: set[str], pids: Sequence[int]) -> set[str]:
        """Those that one of the processes maps or has open."""
        if self._segments is None:
            self._segments = Segments.of(self._host)
        segments = self._segments
        segments.sizes.clear()  # of no use here, and there are new ones in every batch
        files = [(name, file_at(self._host, f"{segments.path}/{name}")) for name in names]
        left = {file.inode: name for name, file in files if file is not None}
        found: set[str] = set()
        for pid in pids:
            for read in (segments.opened, segments.mapped):
                if not left:
                    return found
                found |= {name for inode in read(pid) or () if (name := left.pop(inode, None)) is not None}
        return found


_HELD_SHARE = 0.45  # of /dev/shm, by the job's own processes


def held_shm(host: Host, pids: Sequence[int]) -> int | None:
    """Bytes of /dev/shm that these processes map or have open; None if unreadable."""
    if not pids:
        return 0
    segments = Segments.of(host, pids[0])
    inodes: set[int] = set()
    for pid in pids:
        held = segments.of_process(pid)
        if held is None:
            return None
        inodes |= held.inodes
    return segments.total(inodes)


def refused_shm(host: Host, pids: Sequence[int]) -> int:
    """Bytes without pages of the largest /dev/shm segment that these processes have open: a failed allocation.

    torch sets the file size before it allocates pages, and keeps a file whose allocation failed.
    """
    most = 0
    for pid in pids:
        folder = host.path(f"/proc/{pid}/fd")
        try:
            names = os.listdir(folder)
        except OSError:  # exited, or not readable
            continue
        for name in names:
            # Read the link before stat: stat on a dead network file system would hang.
            if (host.link(f"/proc/{pid}/fd/{name}") or "").startswith(SHM + "/"):
                try:
                    found = os.stat(folder / name)
                except OSError:
                    continue
                most = max(most, found.st_size - found.st_blocks * 512)
    return most


def hangs_on_shm(level: Level | None, held: int | None, log: LogFacts, *, loader: bool, refused: int = 0) -> bool:
    """Whether an idle job waits for a batch that did not fit into /dev/shm. Pure.

    ``refused``: bytes of the job's own segment that got no pages. A segment larger than what is free cannot fit,
    however little the job holds.
    """
    if not loader or level is None or held is None:
        return False
    if held < level.size * _HELD_SHARE and refused <= level.size - level.used:
        return False
    return any(sign.code == "shm" and sign.number <= WINDOW for sign in log.signs)
