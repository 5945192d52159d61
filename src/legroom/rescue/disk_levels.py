"""How full the disks are that a job writes to, read while it lives and at its end.

Covers: the directories named by the caller, the job's working directories, and those of the files that it maps for
writing. Does not cover: /dev/shm (readings.py), what a full disk means (rules_texts.py).

A thread reads them: a network file system that does not answer blocks that thread and nothing else. Levels are kept
at their fullest, because a temporary file is gone with the process that filled the disk.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from legroom.model.death import Level
from legroom.probe.host import Host

_EVERY = 1.0
_MAPS_EVERY = 10.0  # a torch process maps a thousand files: listing them takes a millisecond
_MOST_PROCESSES = 8
_WRITABLE = re.compile(r"^\S+ rw.s \S+ \S+ \d+ +(/(?!dev/|memfd:|SYSV).*)$", re.M)
_DELETED = " (deleted)"


@dataclass
class DiskLevels:
    """The disks of one attempt."""

    host: Host
    folders: Iterable[str]
    pids: Callable[[], list[int]] = list  # the job's processes
    _peaks: dict[int, tuple[str, Level]] = field(default_factory=dict)  # by device
    _mapped: tuple[str, ...] = ()
    _maps_at: float = float("-inf")
    _stop: threading.Event = field(default_factory=threading.Event)
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Read them from now on."""
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self, within: float = 1.0) -> dict[str, Level]:
        """Each disk at its fullest, by directory, the present level included if it comes within that time."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within)
        return dict(list(self._peaks.values()))

    def _run(self) -> None:
        while not self._stop.wait(_EVERY):
            self._read()
        self._read()

    def _read(self) -> None:
        pids = self.pids()[:_MOST_PROCESSES]
        if time.monotonic() - self._maps_at >= _MAPS_EVERY:
            self._maps_at = time.monotonic()
            self._mapped = tuple(
                dict.fromkeys(folder for pid in pids for folder in mapped_folders(self.host, pid))
            )
        places = (self.host.link(f"/proc/{pid}/cwd") for pid in pids)
        for folder in dict.fromkeys((*self.folders, *(place for place in places if place), *self._mapped)):
            room = self.host.disk_space(folder)
            if room is None or not room.size:
                continue
            try:
                device = os.stat(self.host.path(folder)).st_dev
            except OSError:
                continue
            # What root alone may write to is not room: a disk is full when nothing is free to us.
            level = Level(room.size - room.free, room.size)
            old = self._peaks.get(device)
            if old is None or level.share >= old[1].share:
                self._peaks[device] = (old[0] if old else folder, level)


def mapped_folders(host: Host, pid: int) -> list[str]:
    """Directories of the files that a process maps for writing."""
    found = []
    for match in _WRITABLE.finditer(host.text(f"/proc/{pid}/maps") or ""):
        if not match[1].endswith(_DELETED):
            found.append(os.path.dirname(match[1]))
    return found
