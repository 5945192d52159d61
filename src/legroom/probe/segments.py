"""Who holds what of /dev/shm.

Covers: the files of /dev/shm that a process maps or has open, those without a name included (torch's
``file_descriptor`` strategy unlinks a segment as soon as it is made), each with the room it takes.
Does not cover: the files that have names (files.py), or the whole of /dev/shm (shm.py).

A segment is known by its inode: names may be gone, or be those of another container's /dev/shm, which is
another filesystem and shows as another device.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from legroom.probe.files import File, file_at
from legroom.probe.host import Host
from legroom.probe.mounts import Mount, mounted_at, mounts

SHM = "/dev/shm"
_DELETED = " (deleted)"
_AREA = re.compile(
    r"^([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) ([0-9]+) *(.*)$", re.M | re.A
)


@dataclass(frozen=True, slots=True)
class Area:
    """One segment as one process maps it."""

    path: str  # as the kernel names it, " (deleted)" left out
    size: int  # address space
    ranges: tuple[str, ...]  # "start-end", as maps writes them


@dataclass(frozen=True, slots=True)
class Held:
    """What one process holds of /dev/shm."""

    inodes: frozenset[int]  # mapped or open
    address_space: int


def shm_mount(host: Host, pid: int | str = "self") -> tuple[str, Mount | None]:
    """Where /dev/shm really is (it may be a link to /run/shm), and what is mounted there."""
    path = os.path.normpath(os.path.join(os.path.dirname(SHM), host.link(SHM) or SHM))
    return path, mounted_at(mounts(host, pid), path)


def is_memory(mount: Mount) -> bool:
    """Whether a mount is memory of its own, and not a directory of some disk."""
    return mount.kind in ("tmpfs", "ramfs")


@dataclass
class Segments:
    """One /dev/shm, and the size of every segment met so far (inode → bytes by blocks)."""

    host: Host
    path: str
    device: str | None  # as maps writes it; None: no filesystem of its own, so segments are known by path
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, frozenset[int]] = field(default_factory=dict)  # by pid, of those looked at whole
    _at_least: set[int] = field(default_factory=set)  # sizes that are only what one process has touched

    @classmethod
    def of(cls, host: Host, pid: int | str = "self") -> Segments:
        """Those of the /dev/shm that process sees, ourselves by default."""
        path, mount = shm_mount(host, pid)
        return cls(host, path, maps_device(mount.device) if mount and is_memory(mount) else None)

    def know(self, files: Iterable[File]) -> None:
        """Take over the sizes of files that have names."""
        self.sizes.update((file.inode, file.size) for file in files)

    def of_process(self, pid: int) -> Held | None:
        """Everything that process maps or has open; None where it may not be looked into."""
        mapped, opened = self.mapped(pid), self.opened(pid)
        if mapped is None or opened is None:
            return None
        held = Held(frozenset({*mapped, *opened}), sum(area.size for area in mapped.values()))
        self.seen[pid] = held.inodes
        return held

    def total(self, inodes: Iterable[int]) -> int | None:
        """What those segments take together; None where one's size could not be had."""
        sizes = [self.sizes.get(inode) for inode in set(inodes)]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def mapped(self, pid: int) -> dict[int, Area] | None:
        """By inode, the segments that process maps; None where it may not be looked into."""
        text = self.host.text(f"/proc/{pid}/maps")
        if text is None:
            return None if self.host.exists(f"/proc/{pid}") else {}
        areas = parse_maps(text, self.device, self.path)
        unsure = {inode: area for inode, area in areas.items() if self._unsure(inode, area)}
        if unsure:
            self._measure(pid, unsure)
            if any(inode not in self.sizes for inode in areas) and not self.host.exists(f"/proc/{pid}"):
                return {}  # it ended between two reads, and what only it held is gone with it
        return areas

    def opened(self, pid: int) -> set[int] | None:
        """The inodes of the segments that process has open; None where it may not be looked into."""
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(self.host.path(folder))
        except OSError:
            return None if self.host.exists(f"/proc/{pid}") else set()
        found = set()
        for name in names:
            # The link is read before the file is asked: asking a dead network filesystem would hang.
            target = self.host.link(f"{folder}/{name}")
            if target is None or not target.startswith(self.path + "/"):
                continue
            file = file_at(self.host, f"{folder}/{name}", follow=True) or file_at(self.host, target)
            if file is not None and self._here(file):
                found.add(file.inode)
                self._learn(file)
        return found

    def _here(self, file: File) -> bool:
        """Whether it lies on this /dev/shm, and not on another container's of the same path."""
        return None in (self.device, file.device) or maps_device(file.device or "") == self.device

    def _learn(self, file: File) -> None:
        self.sizes[file.inode] = file.size
        self._at_least.discard(file.inode)

    def _unsure(self, inode: int, area: Area) -> bool:
        """Whether another process's view could tell more about a segment's size."""
        return inode not in self.sizes or (inode in self._at_least and self.sizes[inode] < area.size)

    def _measure(self, pid: int, areas: Mapping[int, Area]) -> None:
        """What segments take that no listing has shown: by their inode if it can be reached, else by pages."""
        left = dict(areas)
        for inode, area in areas.items():
            name = "-".join(end.lstrip("0") or "0" for end in area.ranges[0].split("-"))
            for place in (area.path, f"/proc/{pid}/map_files/{name}"):
                file = file_at(self.host, place, follow=place != area.path)
                if file is not None and file.inode == inode and self._here(file):
                    self._learn(file)
                    del left[inode]
                    break
        if left:
            self.opened(pid)
            left = {inode: area for inode, area in left.items() if self._unsure(inode, area)}
        for inode, area in list(left.items()):
            if area.path.startswith(f"{self.path}/sem."):
                # sem_open writes its one page before it maps it: it is there, whether touched here or not.
                start, _, end = area.ranges[0].partition("-")
                self.sizes[inode] = int(end, 16) - int(start, 16)
                del left[inode]
        if left:
            for inode, size in parse_smaps(self.host.text(f"/proc/{pid}/smaps") or "", left).items():
                self.sizes[inode] = max(size, self.sizes.get(inode, 0))
                self._at_least.add(inode)


def maps_device(device: str) -> str | None:
    """A device as maps writes it (``00:1b``), from how mountinfo writes it (``0:27``)."""
    major, _, minor = device.partition(":")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return f"{int(major):02x}:{int(minor):02x}"


def parse_maps(text: str, device: str | None, path: str) -> dict[int, Area]:
    """The segments of one /dev/shm in the text of a maps file, by inode."""
    if (device is not None and f" {device} " not in text) or (device is None and f" {path}/" not in text):
        return {}  # most processes: no need to look at each of a thousand lines
    found: dict[int, Area] = {}
    for match in _AREA.finditer(text):
        start, end, where, inode, name = match.groups()
        if inode == "0" or (where != device if device is not None else not name.startswith(path + "/")):
            continue
        before = found.get(int(inode))
        found[int(inode)] = Area(
            path=name.removesuffix(_DELETED),
            size=int(end, 16) - int(start, 16) + (before.size if before else 0),
            ranges=(*(before.ranges if before else ()), f"{start}-{end}"),
        )
    return found


def parse_smaps(text: str, areas: Mapping[int, Area]) -> dict[int, int]:
    """Bytes of each segment that this process has in memory or in swap: it takes at least that."""
    owner = {span: inode for inode, area in areas.items() for span in area.ranges}
    parts: dict[tuple[int, str], int] = {}  # by offset: the same part mapped twice is there once
    key: tuple[int, str] | None = None
    here = 0
    for line in text.split("\n"):
        words = line.split()
        if len(words) >= 5 and "-" in words[0]:
            inode = owner.get(words[0])
            key, here = (None if inode is None else (inode, words[2])), 0
        elif key is not None and len(words) == 3 and words[0] in ("Rss:", "Swap:") and words[1].isdecimal():
            here += int(words[1]) * 1024
            parts[key] = max(here, parts.get(key, 0))
    sums: dict[int, int] = {}
    for (inode, _), size in parts.items():
        sums[inode] = sums.get(inode, 0) + size
    return sums
