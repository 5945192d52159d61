"""Which files in /dev/shm a job used, and the removal of those that it left behind when it died.

Other jobs of the same user have files there too, under names that do not show whose they are, and a file that no
process uses may be on its way from one process to another. So a file counts as the job's only if one of its processes
was seen to use it, or is named in it: torch writes its creator's pid into the name. In a container that pid alone
proves nothing, because another container with the same /dev/shm has the same pids.

A file that appears and loses its users between two samples may stay; `legroom doctor` lists it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Sequence

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import kind_of, maker_of, shm
from legroom.probe.shm_segments import SHM, Segments, file_at

_SHARE = 0.02  # of one core, for looking at new files
_AGAIN = 1.0  # seconds until files without a known user are looked up again
_FIRST_PID_NAMESPACE = "pid:[4026531836]"  # the machine's own, fixed in the kernel


class JobShmFiles:
    """The files in /dev/shm that a job was seen to use."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._before = frozenset(host.names(SHM))
        self._pids_are_unique = host.link("/proc/self/ns/pid") == _FIRST_PID_NAMESPACE
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
