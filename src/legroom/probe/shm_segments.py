"""Shared-memory segments: which process maps or opens which, and how much each takes.

A segment is identified by its inode. It may have no name: torch's ``file_descriptor`` strategy unlinks it at once. Or
the name belongs to another container's /dev/shm, which is another device.

A recording answers from its ``files``, because a copied tree keeps neither inodes nor owners nor holes::

    "files": {"/dev/shm/torch_7_1_0": {"inode": 12, "blocks": 2048, "uid": 1000, "mode": 384, "mtime": 1.7e9}}

``blocks`` are of 512 bytes, as in stat. ``/proc/7/fd/5`` in ``files`` is an open file that has no name.
"""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from legroom.probe.filesystems_and_cgroups import Mount, mounted_at, mounts
from legroom.probe.host_files_and_syscalls import Host
from legroom.system.lazy_and_optional_imports import import_lock

SHM = "/dev/shm"
_DELETED = " (deleted)"
_AREA = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ [0-9a-f]+ ([0-9a-f]+:[0-9a-f]+) ([0-9]+) *(.*)$", re.M | re.A)


@dataclass(frozen=True, slots=True)
class MappedSegment:
    """One segment as one process maps it."""

    path: str  # as the kernel names it, " (deleted)" left out
    size: int  # address space
    ranges: tuple[str, ...]  # "start-end", as maps writes them


@dataclass(frozen=True, slots=True)
class HeldSegments:
    """What one process uses of /dev/shm."""

    inodes: frozenset[int]  # mapped or open
    address_space: int


def shm_mount(host: Host, pid: int | str = "self") -> tuple[str, Mount | None]:
    """Where /dev/shm really is (it may be a link to /run/shm), and what is mounted there."""
    path = os.path.normpath(os.path.join(os.path.dirname(SHM), host.link(SHM) or SHM))
    return path, mounted_at(mounts(host, pid), path)


def is_memory(mount: Mount) -> bool:
    """Whether a mount is a filesystem in memory, not a directory on a disk."""
    return mount.kind in ("tmpfs", "ramfs")


@dataclass
class Segments:
    """One /dev/shm, and the size of every segment read so far (inode → allocated bytes)."""

    host: Host
    path: str
    device: str | None  # as in maps; None: not a separate filesystem, so segments are known by path
    sizes: dict[int, int] = field(default_factory=dict)
    seen: dict[int, frozenset[int]] = field(default_factory=dict)  # by pid, of those read completely
    _at_least: set[int] = field(default_factory=set)  # sizes that are only lower bounds: pages that one process touched

    @classmethod
    def of(cls, host: Host, pid: int | str = "self") -> Segments:
        """The segments of the /dev/shm that a process sees, by default this one."""
        path, mount = shm_mount(host, pid)
        return cls(host, path, maps_device(mount.device) if mount and is_memory(mount) else None)

    def know(self, files: Iterable[FileFacts]) -> None:
        """Remember the sizes of named files."""
        self.sizes.update((file.inode, file.size) for file in files)

    def of_process(self, pid: int) -> HeldSegments | None:
        """Everything that process maps or has open; None if it may not be read."""
        mapped, opened = self.mapped(pid), self.opened(pid)
        if mapped is None or opened is None:
            return None
        held = HeldSegments(frozenset({*mapped, *opened}), sum(area.size for area in mapped.values()))
        self.seen[pid] = held.inodes
        return held

    def total(self, inodes: Iterable[int]) -> int | None:
        """The total size of those segments; None if one is unknown."""
        sizes = [self.sizes.get(inode) for inode in set(inodes)]
        return None if None in sizes else sum(size for size in sizes if size is not None)

    def mapped(self, pid: int) -> dict[int, MappedSegment] | None:
        """By inode, the segments that process maps; None if it may not be read."""
        text = self.host.text(f"/proc/{pid}/maps")
        if text is None:
            return None if self.host.exists(f"/proc/{pid}") else {}
        areas = parse_maps(text, self.device, self.path)
        unsure = {inode: area for inode, area in areas.items() if self._unsure(inode, area)}
        if unsure:
            self._measure(pid, unsure)
            if any(inode not in self.sizes for inode in areas) and not self.host.exists(f"/proc/{pid}"):
                return {}  # it ended between two reads, and its own segments are gone with it
        return areas

    def opened(self, pid: int) -> set[int] | None:
        """The inodes of the segments that process has open; None if it may not be read."""
        folder = f"/proc/{pid}/fd"
        try:
            names = os.listdir(self.host.path(folder))
        except OSError:
            return None if self.host.exists(f"/proc/{pid}") else set()
        found = set()
        for name in names:
            # Read the link before stat: stat on a dead network filesystem would hang.
            target = self.host.link(f"{folder}/{name}")
            if target is None or not target.startswith(self.path + "/"):
                continue
            file = file_at(self.host, f"{folder}/{name}", follow=True) or file_at(self.host, target)
            if file is not None and self._here(file):
                found.add(file.inode)
                self._learn(file)
        return found

    def _here(self, file: FileFacts) -> bool:
        """Whether it is on this /dev/shm, not on another container's with the same path."""
        return None in (self.device, file.device) or maps_device(file.device or "") == self.device

    def _learn(self, file: FileFacts) -> None:
        self.sizes[file.inode] = file.size
        self._at_least.discard(file.inode)

    def _unsure(self, inode: int, area: MappedSegment) -> bool:
        """Whether another process may show more of a segment's size."""
        return inode not in self.sizes or (inode in self._at_least and self.sizes[inode] < area.size)

    def _measure(self, pid: int, areas: Mapping[int, MappedSegment]) -> None:
        """Sizes of segments that no listing has shown: by stat if possible, else by resident pages."""
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
                # sem_open writes its one page before mapping it, so it is allocated even if not touched here.
                start, _, end = area.ranges[0].partition("-")
                self.sizes[inode] = int(end, 16) - int(start, 16)
                del left[inode]
        if left:
            for inode, size in parse_smaps(self.host.text(f"/proc/{pid}/smaps") or "", left).items():
                self.sizes[inode] = max(size, self.sizes.get(inode, 0))
                self._at_least.add(inode)


def maps_device(device: str) -> str | None:
    """A device in the format of maps (``00:1b``), from that of mountinfo (``0:27``)."""
    major, _, minor = device.partition(":")
    if not (major.isdecimal() and minor.isdecimal()):
        return None
    return f"{int(major):02x}:{int(minor):02x}"


def parse_maps(text: str, device: str | None, path: str) -> dict[int, MappedSegment]:
    """The segments of one /dev/shm in the text of a maps file, by inode."""
    if (device is not None and f" {device} " not in text) or (device is None and f" {path}/" not in text):
        return {}  # most processes: no need to parse a thousand lines
    found: dict[int, MappedSegment] = {}
    for match in _AREA.finditer(text):
        start, end, where, inode, name = match.groups()
        if inode == "0" or (where != device if device is not None else not name.startswith(path + "/")):
            continue
        before = found.get(int(inode))
        found[int(inode)] = MappedSegment(
            path=name.removesuffix(_DELETED),
            size=int(end, 16) - int(start, 16) + (before.size if before else 0),
            ranges=(*(before.ranges if before else ()), f"{start}-{end}"),
        )
    return found


def parse_smaps(text: str, areas: Mapping[int, MappedSegment]) -> dict[int, int]:
    """Bytes of each segment that this process has in memory or swap: a lower bound of its size."""
    owner = {span: inode for inode, area in areas.items() for span in area.ranges}
    parts: dict[tuple[int, str], int] = {}  # by offset: a part that is mapped twice counts once
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


MOST_FILES = 20_000
_DEEPEST = 16


@dataclass(frozen=True, slots=True)
class FileFacts:
    """Results of stat for a file."""

    path: str
    inode: int
    size: int  # allocated blocks, not the nominal length
    owner: int
    mtime: float
    device: str | None = None  # "major:minor"; None: not recorded


@dataclass(frozen=True, slots=True)
class FileListing:
    """The files below a directory."""

    files: tuple[FileFacts, ...]
    cut: bool = False  # more files than are read at once


def file_at(host: Host, path: str, *, follow: bool = False) -> FileFacts | None:
    """stat of one file; ``follow`` follows a link such as /proc/<pid>/fd/<n>."""
    if _recorded(host) is not None:
        return _from_recording(host, path)
    try:
        facts = os.stat(host.path(path), follow_symlinks=follow)
    except (OSError, ValueError):
        return None
    return _file(path, facts)


def files_below(host: Host, path: str, *, most: int = MOST_FILES) -> FileListing:
    """Every file below ``path`` that is not a directory, on the same filesystem; links are not followed."""
    recorded = _recorded(host)
    if recorded is not None:
        names = sorted(name for name in recorded if name.startswith(path + "/"))
        found = [file for name in names[:most] if (file := _from_recording(host, name)) is not None]
        return FileListing(tuple(found), cut=len(names) > most)
    try:
        device = os.stat(host.path(path)).st_dev
    except OSError:
        return FileListing(())
    files: list[FileFacts] = []
    cut = False
    waiting = [(path, 0)]
    while waiting:
        folder, depth = waiting.pop()
        try:
            with os.scandir(host.path(folder)) as entries:
                for entry in entries:
                    try:
                        facts = entry.stat(follow_symlinks=False)
                    except OSError:  # deleted since it was listed
                        continue
                    if facts.st_dev != device:
                        continue
                    here = f"{folder}/{entry.name}"
                    if stat.S_ISDIR(facts.st_mode):
                        cut = cut or depth >= _DEEPEST
                        if depth < _DEEPEST:
                            waiting.append((here, depth + 1))
                    elif len(files) >= most:
                        cut = True
                        break
                    else:
                        files.append(_file(here, facts))
        except OSError:
            continue  # no permission to list: its content stays unexplained
        if len(files) >= most and cut:
            break
    return FileListing(tuple(sorted(files, key=lambda file: file.path)), cut)


def has_writer(host: Host, path: str) -> bool | None:
    """Whether any process, visible here or not, has that file open or mapped for writing; None: unknown.

    The kernel refuses a read lease on a file that is open for writing, whichever container or user the writer
    is in. This does not depend on which /proc may be read. Only the file's owner (or root) may do it.
    """
    if sys.platform != "linux" or not host.live:
        return None
    with import_lock:
        import fcntl
        import signal

    try:
        opened = os.open(host.path(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
    except (OSError, ValueError):
        return None
    try:
        # If a writer opens the file between these calls, it waits for the second one, and the kernel notifies us by a
        # signal. The usual one, SIGIO, would end this process; SIGURG is ignored unless it is handled.
        fcntl.fcntl(opened, fcntl.F_SETSIG, signal.SIGURG)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_RDLCK)
        fcntl.fcntl(opened, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    except BlockingIOError:
        return True
    except OSError:  # not the owner, or a kernel without leases
        return None
    finally:
        os.close(opened)
    return False


def _file(path: str, facts: os.stat_result) -> FileFacts:
    blocks = getattr(facts, "st_blocks", 0)  # not on Windows, where it is never called
    device = f"{os.major(facts.st_dev)}:{os.minor(facts.st_dev)}" if hasattr(os, "major") else None
    return FileFacts(path, facts.st_ino, blocks * 512, facts.st_uid, facts.st_mtime, device)


def _recorded(host: Host) -> dict[str, Any] | None:
    found = None if host.recording is None else host.recording.get("files")
    return found if isinstance(found, dict) else None


def _from_recording(host: Host, path: str) -> FileFacts | None:
    facts = (_recorded(host) or {}).get(path)
    if not isinstance(facts, dict):
        return None
    return FileFacts(
        path=path,
        inode=int(facts.get("inode", 0)),
        size=int(facts.get("blocks", 0)) * 512,
        owner=int(facts.get("uid", 0)),
        mtime=float(facts.get("mtime", 0.0)),
        device=facts.get("device"),
    )
