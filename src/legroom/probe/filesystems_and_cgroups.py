"""Mounts, the disks of the dataset store, of the working directory and of a job, and the cgroups of a process.

mountinfo lists mounts in the order they were made: of several at one point, the last is visible.

Other machines may delete files on a network filesystem, and a mapped file that disappears there is a SIGBUS here. So
the store is put on one only if LEGROOM_DIR names it.

Cgroups are v1, v2 or both side by side, in mounts that may show only a part of the hierarchy, and in namespaces. The
mounts are the reader's own, not those of ``pid``: the files are opened from here, and the kernel writes both the paths
in /proc/<pid>/cgroup and the roots in mountinfo relative to the reader's namespace.
"""

from __future__ import annotations

import os
import re
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Literal

from legroom.messages import joined, say
from legroom.probe.host_files_and_syscalls import DiskSpace, Host
from legroom.records.machine import Disk, Level, Pool
from legroom.system.processes_and_threads import start_daemon_thread, why_no_thread

_ESCAPE = re.compile(r"\\([0-3][0-7]{2})")  # how the kernel escapes space, tab, newline and backslash


@dataclass(frozen=True, slots=True)
class Mount:
    """One line of mountinfo."""

    point: str  # mount point
    root: str  # which directory of the filesystem is mounted there
    kind: str  # tmpfs, overlay, cgroup2, …
    source: str
    options: tuple[str, ...]  # of this mount: ro, nosuid, …
    super_options: tuple[str, ...]  # of the filesystem: size=65536k, memory (a v1 controller), …
    device: str = ""  # "major:minor" in decimal


def mounts(host: Host, pid: int | str = "self") -> list[Mount]:
    """Every mount that process sees, in the kernel's order; empty where it cannot be read."""
    return parse_mountinfo(host.text(f"/proc/{pid}/mountinfo") or "")


def mounted_at(found: list[Mount], point: str) -> Mount | None:
    """The visible mount at exactly ``point``: the last one made there."""
    return next((mount for mount in reversed(found) if mount.point == point), None)


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts in a mountinfo file; invalid lines are skipped."""
    # Only "\n" ends a line: str.splitlines() would also break at characters that a path may contain.
    return [mount for line in text.split("\n") if (mount := _line(line)) is not None]


def _line(line: str) -> Mount | None:
    # Optional fields end with a single "-". Split at single spaces: a source may be empty.
    ahead, dash, behind = line.partition(" - ")
    front, back = ahead.split(" "), behind.split(" ")
    if not dash or len(front) < 6 or len(back) < 3 or not front[4].startswith("/"):
        return None
    return Mount(
        point=_plain(front[4]),
        root=_plain(front[3]),
        kind=back[0],
        source=_plain(back[1]),
        options=_options(front[5]),
        super_options=_options(back[2]),
        device=front[2],
    )


def _options(text: str) -> tuple[str, ...]:
    return tuple(_plain(option) for option in text.split(",") if option)


def _plain(text: str) -> str:
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), text)


# Filesystems that other machines (or the host of this virtual one) also write to. Clustered ones on shared
# disks (ocfs2, gfs2) count: what matters is whether other machines may delete files.
_NETWORK = frozenset(
    {
        "nfs", "nfs3", "nfs4", "cifs", "smb2", "smb3", "smbfs", "afpfs", "webdav", "davfs", "afs", "coda", "ncpfs",
        "lustre", "lustre_lite", "gpfs", "beegfs", "ceph", "glusterfs", "panfs", "pvfs2", "orangefs", "wekafs",
        "ocfs2", "gfs2", "quobyte", "dvs", "9p", "virtiofs", "vboxsf", "vmhgfs", "prl_fs", "drvfs", "autofs",
        "fuse",
    }
)  # fmt: skip
# FUSE is how most network storage is mounted, but these are the roots of rootless containers.
_LOCAL_FUSE = frozenset({"fuse.fuse-overlayfs", "fuse.squashfuse", "fuse.squashfuse_ll"})


@dataclass(frozen=True, slots=True)
class StoreDirectory:
    """A directory that the dataset store may use."""

    path: str
    named_by: str
    asked_for: bool = False  # LEGROOM_DIR: used even on a network filesystem
    may_create: bool = False  # need not exist yet


def is_network(kind: str | None) -> bool:
    """Whether a filesystem of that kind is shared with other machines; unknown kinds count as local."""
    if kind is None or kind in _LOCAL_FUSE:
        return False
    return kind in _NETWORK or kind.startswith("fuse.")


def filesystem_of(host: Host, path: str) -> Mount | None:
    """The mount of ``path``: the longest mount point above it, the last one made there."""
    if host.live and host.root == Path("/") and "\0" not in path:
        path = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts(host):
        if _below(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def store_candidates(host: Host) -> tuple[StoreDirectory, ...]:
    """Where a store on disk may be, best first."""
    found = []
    if named := host.env.get("LEGROOM_DIR"):
        found.append(StoreDirectory(_absolute(host, named), "LEGROOM_DIR", asked_for=True, may_create=True))
    if folder := host.env.get("SLURM_TMPDIR"):
        found.append(StoreDirectory(folder, "SLURM_TMPDIR"))
    found.append(StoreDirectory("/var/tmp", "/var/tmp"))
    if folder := host.env.get("XDG_CACHE_HOME"):
        found.append(StoreDirectory(folder, "XDG_CACHE_HOME", may_create=True))
    elif home := host.env.get("HOME") or host.env.get("USERPROFILE"):
        found.append(StoreDirectory(str(Path(home) / ".cache"), "~/.cache", may_create=True))
    return tuple(found)


def why_not(host: Host, candidate: StoreDirectory) -> str | None:
    """Why a store cannot be there; None if it can."""
    if "\0" in candidate.path or not (os.path.isabs(candidate.path) or candidate.path.startswith("/")):
        return say("not an absolute path")
    mount = filesystem_of(host, candidate.path)
    if mount is not None and is_network(mount.kind) and not candidate.asked_for:
        return say("{kind} is shared with other machines", kind=mount.kind)
    if mount is not None and "ro" in mount.options:
        return say("mounted read-only")
    return _cannot_write(host, candidate)


def disks(host: Host) -> tuple[Disk, ...]:
    """The store's disk and the working directory's."""
    return _store(host), _work(host)


def disk_at(host: Host, role: str, path: str) -> Disk:
    """The disk of ``path``, which need not exist yet."""
    return _disk(host, role, _absolute(host, path))


def disk_pool(disks: tuple[Disk, ...]) -> Pool:
    """The store's disk as a pool."""
    store = next((disk for disk in disks if disk.role == "store"), None)
    if store is None:
        return Pool("disk", None, None, None, say("no store"), say("no directory for the store was checked"))
    source = f"statvfs({store.path or '?'})"
    return Pool("disk", store.size, store.used, store.free, source, store.reason)


def _store(host: Host) -> Disk:
    refused = []
    for candidate in store_candidates(host):
        problem = why_not(host, candidate)
        if problem is None:
            return _disk(host, "store", candidate.path)
        refused.append(say("{name} {path}: {why}", name=candidate.named_by, path=candidate.path, why=problem))
    return Disk(
        "store", "", None, None, None, say("no usable directory for the store: {refused}", refused=joined(refused))
    )


def _work(host: Host) -> Disk:
    path = _working_directory(host)
    if path is None:
        return Disk("work", "", None, None, None, say("the working directory is unknown or was removed"))
    return _disk(host, "work", path)


def _disk(host: Host, role: str, path: str) -> Disk:
    mount = filesystem_of(host, path)
    room = _room(host, path, mount.point if mount else None)
    reasons = []
    if room is None:
        reasons.append(say("cannot read the free space of {path}", path=path))
    if mount is None:
        reasons.append(say("kind of filesystem unknown: {why}", why=host.why("/proc/self/mountinfo")))
    elif is_network(mount.kind):
        reasons.append(say("{kind} is shared with other machines", kind=mount.kind))
    size, free, used = room if room is not None else (None, None, None)
    return Disk(role, path, size, free, mount.kind if mount else None, joined(reasons) or None, used)


def _room(host: Host, path: str, point: str | None) -> DiskSpace | None:
    """Free space at the path, or at its nearest existing parent on the same mount."""
    for folder in (path, *(str(parent) for parent in _pure(path).parents)):
        if point is not None and not _below(folder, point):
            break
        try:
            room = host.disk_space(folder)
        except (ValueError, TypeError, IndexError, AttributeError):  # an invalid recording
            room = None
        if room is not None:
            return room
    return None


def _cannot_write(host: Host, candidate: StoreDirectory) -> str | None:
    if not host.live:
        return _recorded_cannot_write(host, candidate.path)
    folder = host.path(candidate.path)
    while candidate.may_create and not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    if not os.path.isdir(folder):
        return say("does not exist") if not os.path.lexists(folder) else say("not a directory")
    return None if os.access(folder, os.W_OK | os.X_OK) else say("not writable")


def _recorded_cannot_write(host: Host, path: str) -> str | None:
    try:
        owner = host.owner_mode(path)
    except (ValueError, TypeError, IndexError, AttributeError):
        return say("the recording is not valid here")
    if owner is None:  # not recorded: only its size, or that it is a directory, is known
        known = _room(host, path, path) is not None or host.exists(path)
        return None if known else say("does not exist")
    uid, mode = owner
    ours = host.uid == 0 or (uid == host.uid and mode & 0o200) or mode & 0o002
    return None if ours else say("not writable")


def _working_directory(host: Host) -> str | None:
    if host.live and host.root == Path("/"):
        try:
            return os.getcwd()
        except OSError:  # removed meanwhile
            return None
    recorded = (host.recording or {}).get("cwd") or host.env.get("PWD")
    return recorded if isinstance(recorded, str) else None


def _absolute(host: Host, path: str) -> str:
    home = host.env.get("HOME")
    if home and path.startswith("~/"):  # a shell leaves it there in quotes, and Docker in ENV
        return os.path.join(home, path[2:])
    folder = _working_directory(host)
    return path if os.path.isabs(path) or folder is None else os.path.join(folder, path)


def _below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _pure(path: str) -> PurePosixPath | Path:
    return PurePosixPath(path) if path.startswith("/") else Path(path)


_SHM = "/dev/shm"
_READ_EVERY = 1.0
_MAPS_EVERY = 10.0  # listing a torch process's thousand mappings takes a millisecond
_MOST_CWDS = 8
_MOST_MOUNTS = 200
# Their space is read without a server that may not answer.
_LOCAL = frozenset({"tmpfs", "ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "overlay", "bcachefs", "vfat"})
_FULL = 0.98
_WRITABLE = re.compile(r"^\S+ rw.s \S+ \S+ \d+ +(/(?!dev/|memfd:|SYSV).*)$", re.M)
_DELETED = " (deleted)"


@dataclass
class DiskLevels:
    """How full the disks are that processes write to, each at its peak.

    A thread reads them, so that a network file system that does not answer blocks nothing else. Peaks are kept: a
    temporary file disappears with the process that filled the disk.
    """

    host: Host
    folders: Iterable[str]
    pids: Callable[[], list[int]] = list  # these processes
    _peaks: dict[int, tuple[str, Level]] = field(default_factory=dict)  # by device
    full_before: dict[str, Level] = field(default_factory=dict)  # other disks, full at the start and at the end
    _named: tuple[str, ...] = ()
    _before: dict[int, int] = field(default_factory=dict)  # bytes used at the start, by device; other mounts too
    _mapped: tuple[str, ...] = ()
    _maps_at: float = float("-inf")
    _stop: threading.Event = field(default_factory=threading.Event)
    reason: str | None = None  # why no disk is read
    _thread: threading.Thread | None = None

    def start(self) -> None:
        """Start reading."""
        self._thread = start_daemon_thread(self._run, "legroom-disks")
        if self._thread is None:
            self.reason = say("disk usage: {why}", why=why_no_thread())

    def finish(self, within: float = 1.0, named: Iterable[str] = ()) -> dict[str, Level]:
        """Each disk's peak, by directory, including its present level if it is read within that time.

        ``named``: paths in their last messages. Their disks are read, too, and every local disk that became full
        meanwhile: a file may be written and the job be gone between two readings.
        """
        self._named = tuple(named)
        self._stop.set()
        if self._thread is not None:
            self._thread.join(within)
        return dict(list(self._peaks.values()))

    def _run(self) -> None:
        self._before = {device: level.used for device, (_, level) in self._local_disks().items()}
        while not self._stop.wait(_READ_EVERY):
            self._read()
        self._finish_reading()

    def _finish_reading(self) -> None:
        """Read once more: the disks of paths that were named, and local disks that are full now."""
        self.folders = (*filter(None, map(_existing_folder, self._named)), *self.folders)
        self._read()
        for device, (point, level) in self._local_disks().items():
            if level.share >= _FULL and device not in self._peaks:
                if level.used > self._before.get(device, 0):
                    self._peaks[device] = (point, level)
                else:
                    self.full_before[point] = level

    def _local_disks(self) -> dict[int, tuple[str, Level]]:
        """The mounted local disks, by device; not /dev/shm, which is sampled by itself."""
        found: dict[int, tuple[str, Level]] = {}
        for mount in mounts(self.host)[-_MOST_MOUNTS:]:
            inside = mount.point == _SHM or mount.point.startswith(("/dev/", "/proc/", "/sys/", "/run/"))
            if mount.kind not in _LOCAL or "ro" in mount.options or inside:
                continue
            read = self._level(mount.point)
            if read is not None:
                found.setdefault(read[0], (mount.point, read[1]))
        return found

    def _level(self, folder: str) -> tuple[int, Level] | None:
        """The device of a directory and how full it is."""
        room = self.host.disk_space(folder)
        if room is None or not room.size:
            return None
        try:
            device = os.stat(self.host.path(folder)).st_dev
        except OSError:
            return None
        # Blocks reserved for root do not count: a disk is full when nothing is free for us.
        return device, Level(room.size - room.free, room.size)

    def _read(self) -> None:
        pids = self.pids()[:_MOST_CWDS]
        if time.monotonic() - self._maps_at >= _MAPS_EVERY:
            self._maps_at = time.monotonic()
            self._mapped = tuple(dict.fromkeys(folder for pid in pids for folder in mapped_folders(self.host, pid)))
        places = (self.host.link(f"/proc/{pid}/cwd") for pid in pids)
        for folder in dict.fromkeys((*self.folders, *(place for place in places if place), *self._mapped)):
            if (read := self._level(folder)) is None:
                continue
            device, level = read
            old = self._peaks.get(device)
            if old is None or level.share >= old[1].share:
                self._peaks[device] = (old[0] if old else folder, level)


def _existing_folder(path: str) -> str | None:
    """The path, or the nearest directory above it; None if not even the first one exists here."""
    while path != "/" and not os.path.isdir(path):
        path = os.path.dirname(path)
    return None if path == "/" else path


def mapped_folders(host: Host, pid: int) -> list[str]:
    """Directories of files that a process maps for writing."""
    found = []
    for match in _WRITABLE.finditer(host.text(f"/proc/{pid}/maps") or ""):
        if not match[1].endswith(_DELETED):
            found.append(os.path.dirname(match[1]))
    return found


Version = Literal["v1", "v2"]
UNIFIED = ""  # selects the v2 hierarchy whatever its controllers: PSI is there even if memory is v1

# Files that every cgroup except the machine's root has.
_NOT_IN_ROOT = ("cgroup.type", "cgroup.events", "memory.max")


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one process in one hierarchy."""

    version: Version | None  # None: there is no such cgroup, or it cannot be found
    chain: tuple[str, ...]  # directories: its own first, then its visible parents
    above_hidden: bool | None  # the last of the chain is not the machine's root
    reason: str | None = None  # why it is unknown, or why a parent was read instead

    @property
    def is_root(self) -> bool:
        """Whether the process is in the machine's root cgroup."""
        return len(self.chain) == 1 and not self.above_hidden


def cgroup(host: Host, controller: str, pid: str = "self") -> Cgroup:
    """The cgroup of ``pid`` for ``controller`` (memory, cpu)."""
    file = f"/proc/{pid}/cgroup"
    membership = _membership(host.text(file) or "", controller)
    if membership is None:
        return Cgroup(None, (), None, host.why(file))
    version, path = membership
    seen = _hierarchy_mounts(host, version, controller)
    if not seen:
        name = "cgroup v2" if version == "v2" else f"cgroup v1 {controller}"
        return Cgroup(None, (), None, say("{name} is not mounted here", name=name))
    found = [_locate(host, version, mount, path) for mount in seen]
    # Of several mounts the best shows the process's own cgroup, then most of its parents.
    return max(found, key=lambda group: (bool(group.chain), group.reason is None, len(group.chain)))


def _membership(text: str, controller: str) -> tuple[Version, str] | None:
    """Which hierarchy the controller is in and the process's path there: lines are ``id:controllers:path``."""
    unified: str | None = None
    for line in text.split("\n"):
        number, _, rest = line.partition(":")
        controllers, colon, path = rest.partition(":")
        if not colon or not number.isdecimal() or not path.startswith("/"):
            continue
        if controller and controller in controllers.split(","):
            return "v1", path
        if number == "0" and not controllers:
            unified = path
    return ("v2", unified) if unified is not None else None


def _hierarchy_mounts(host: Host, version: Version, controller: str) -> list[Mount]:
    # With another root than "/", this process's mounts are not those of that machine; use init's.
    first = ("self",) if host.recording is not None or str(host.root) == "/" else ("1", "self")
    found = next((listing for pid in first if (listing := mounts(host, pid))), [])
    seen = [mount for mount in found if mounted_at(found, mount.point) is mount]
    if version == "v2":
        return [mount for mount in seen if mount.kind == "cgroup2"]
    return [mount for mount in seen if mount.kind == "cgroup" and controller in mount.super_options]


def _locate(host: Host, version: Version, mount: Mount, path: str) -> Cgroup:
    root = _parts(mount.root)
    inside, reason = _inside(root, _parts(path)), None
    if inside is None:
        reason = say("{path} is outside the mount at {point}", path=path, point=mount.point)
        return Cgroup(None, (), None, reason)
    if _unnamed(root, _parts(path)):
        reason = say("the cgroup namespace hides the path of this cgroup below {point}", point=mount.point)
    names = list(inside)
    top = mount.point.rstrip("/")
    while names and not host.exists("/".join((top, *names))):
        # A removed cgroup reads "/gone (deleted)". Its parents still exist and still limit.
        gone = "/".join((top, *names))
        reason = reason or say("{path} does not exist; its parent cgroup was read instead", path=gone)
        names.pop()
    chain = tuple("/".join((top, *names[:depth])) for depth in range(len(names), -1, -1))
    hidden = any(part != ".." for part in root) or _not_the_root(host, version, chain[-1])
    return Cgroup(version, chain, hidden, reason)


def _inside(root: list[str], path: list[str]) -> list[str] | None:
    """The path below the mount's root; None where it is not below it."""
    if _unnamed(root, path):
        return []
    rest = path[len(root) :]
    return rest if path[: len(root)] == root and ".." not in rest else None


def _unnamed(root: list[str], path: list[str]) -> bool:
    """Whether the mount starts above the namespace's root, so that the path from there is unknown."""
    return bool(root) and all(part == ".." for part in root) and path[: len(root)] != root


def _not_the_root(host: Host, version: Version, top: str) -> bool:
    if version == "v1":
        return not host.exists(f"{top}/release_agent")
    return any(host.exists(f"{top}/{name}") for name in _NOT_IN_ROOT)


def _parts(path: str) -> list[str]:
    return [part for part in path.split("/") if part]
