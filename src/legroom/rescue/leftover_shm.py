"""Which files in /dev/shm a job used, and the removal of those that it left behind when it died.

Other jobs of the same user have files there too, under names that do not show whose they are, and a file that no
process uses may be on its way from one process to another. So a file counts as the job's only if one of its processes
was seen to use it, or is named in it (torch writes the creator's pid into the name). A file that appears and loses its
users between two samples stays; `legroom doctor` lists it.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Sequence

from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.shm import kind_of, maker_of, shm
from legroom.probe.shm_segments import SHM, Segments, file_at

_REMOVABLE = ("torch", "python")  # kinds of files
_SHARE = 0.02  # of one core, for looking up the users of new files
_AGAIN = 1.0  # seconds until files without a known user are looked up again


class JobShmFiles:
    """The files in /dev/shm that a job was seen to use."""

    def __init__(self, host: Host, clock: Callable[[], float] = time.monotonic) -> None:
        self._host, self._clock = host, clock
        self._before = frozenset(host.names(SHM))
        self._segments: Segments | None = None
        self._used: set[str] = set()
        self._others: set[str] = set()  # looked up, and used by none of the job's processes so far
        self._next = self._again = clock()

    def update(self, pids: Callable[[], Sequence[int]]) -> None:
        """Look up the users of files that are new; ``pids`` are the job's processes."""
        began = self._clock()
        if began < self._next:
            return
        if began >= self._again:
            self._again = began + _AGAIN
            self._others.clear()
        names = [name for name in self._host.names(SHM) if kind_of(name) in _REMOVABLE]
        new = {name for name in names if name not in self._before and name not in self._used | self._others}
        if not new:
            return
        processes = pids()
        self._used |= {name for name in new if maker_of(name) in processes}
        self._used |= self._held(new - self._used, processes)
        self._others |= new - self._used
        self._next = self._clock() + (self._clock() - began) / _SHARE

    def _held(self, names: set[str], pids: Sequence[int]) -> set[str]:
        """Those that one of the processes maps or has open."""
        if self._segments is None:
            self._segments = Segments.of(self._host)
        segments = self._segments
        files = [(name, file_at(self._host, f"{segments.path}/{name}")) for name in names]
        left = {file.inode: name for name, file in files if file is not None}
        found: set[str] = set()
        for pid in pids:
            for read in (segments.opened, segments.mapped):
                if not left:
                    return found
                found |= {name for inode in read(pid) or () if (name := left.pop(inode, None)) is not None}
        return found

    def remove(self) -> int:
        """Remove those of them that no process is known to use, after the job's have ended; the bytes freed."""
        freed = 0
        if not self._used.intersection(self._host.names(SHM)):
            return freed
        for file in shm(self._host).files:
            if file.name in self._used and not file.mapped and file.owner == self._host.uid:
                with contextlib.suppress(OSError):
                    os.unlink(self._host.path(f"{SHM}/{file.name}"))
                    freed += file.size
        return freed
