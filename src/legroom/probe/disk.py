"""Room on the disks that matter: where the dataset store would be, and the working directory.

Covers: which place of the candidates the store would take, its filesystem's kind, whether that is local.
Does not cover: /dev/shm (shm.py), making a store or trusting it (cache).

A store on a network filesystem is shared with machines whose cleaning is a SIGBUS here, so those are taken only
when LEGROOM_DIR names them.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from legroom.model import Disk, Pool
from legroom.probe.host import Host, Room
from legroom.probe.mounts import Mount, mounts
from legroom.words import joined, say

# Filesystems that other machines (or the host of this virtual one) also write to. Clustered ones on shared
# disks (ocfs2, gfs2) count: what matters is who else may delete.
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
class Candidate:
    """A place the dataset store may take."""

    path: str
    named_by: str
    asked_for: bool = False  # LEGROOM_DIR: taken even when it is on a network
    may_create: bool = False  # need not exist yet


def is_network(kind: str | None) -> bool:
    """Whether a filesystem of that kind is shared with other machines; an unknown kind is taken for local."""
    if kind is None or kind in _LOCAL_FUSE:
        return False
    return kind in _NETWORK or kind.startswith("fuse.")


def filesystem_of(host: Host, path: str) -> Mount | None:
    """The mount that holds ``path``: the longest mount point it lies below, the last one made there."""
    if host.live and host.root == Path("/") and "\0" not in path:
        path = os.path.realpath(path)
    best: Mount | None = None
    for mount in mounts(host):
        if _below(path, mount.point) and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best


def store_candidates(host: Host) -> tuple[Candidate, ...]:
    """Where a store on disk may be, best first."""
    found = []
    if named := host.env.get("LEGROOM_DIR"):
        found.append(Candidate(_absolute(host, named), "LEGROOM_DIR", asked_for=True, may_create=True))
    if folder := host.env.get("SLURM_TMPDIR"):
        found.append(Candidate(folder, "SLURM_TMPDIR"))
    found.append(Candidate("/var/tmp", "/var/tmp"))
    if folder := host.env.get("XDG_CACHE_HOME"):
        found.append(Candidate(folder, "XDG_CACHE_HOME", may_create=True))
    elif home := host.env.get("HOME") or host.env.get("USERPROFILE"):
        found.append(Candidate(str(Path(home) / ".cache"), "~/.cache", may_create=True))
    return tuple(found)


def why_not(host: Host, candidate: Candidate) -> str | None:
    """Why a store cannot be there, or None where it can."""
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
    """The disk that would hold ``path``, which need not exist yet."""
    return _disk(host, role, _absolute(host, path))


def disk_pool(disks: tuple[Disk, ...]) -> Pool:
    """The store's disk as a pool."""
    store = next((disk for disk in disks if disk.role == "store"), None)
    if store is None:
        return Pool("disk", None, None, None, say("no store"), say("no place for a store was looked for"))
    source = say("statvfs {path}", path=store.path or "?")
    return Pool("disk", store.size, store.used, store.free, source, store.reason)


def _store(host: Host) -> Disk:
    refused = []
    for candidate in store_candidates(host):
        problem = why_not(host, candidate)
        if problem is None:
            return _disk(host, "store", candidate.path)
        refused.append(say("{name} {path}: {why}", name=candidate.named_by, path=candidate.path, why=problem))
    return Disk("store", "", None, None, None, say("no usable place: {refused}", refused=joined(refused)))


def _work(host: Host) -> Disk:
    path = _working_directory(host)
    if path is None:
        return Disk("work", "", None, None, None, say("the working directory is not known or was removed"))
    return _disk(host, "work", path)


def _disk(host: Host, role: str, path: str) -> Disk:
    mount = filesystem_of(host, path)
    room = _room(host, path, mount.point if mount else None)
    reasons = []
    if room is None:
        reasons.append(say("the room at {path} cannot be asked for", path=path))
    if mount is None:
        reasons.append(say("kind of filesystem unknown: {why}", why=host.why("/proc/self/mountinfo")))
    elif is_network(mount.kind):
        reasons.append(say("{kind} is shared with other machines", kind=mount.kind))
    size, free, used = room if room is not None else (None, None, None)
    return Disk(role, path, size, free, mount.kind if mount else None, joined(reasons) or None, used)


def _room(host: Host, path: str, point: str | None) -> Room | None:
    """Ask at the path, else at the nearest folder above it that is still on the same mount, where that is known."""
    for folder in (path, *(str(parent) for parent in _pure(path).parents)):
        if point is not None and not _below(folder, point):
            break
        try:
            room = host.room(folder)
        except (ValueError, TypeError, IndexError, AttributeError):  # a recording that holds nonsense
            room = None
        if room is not None:
            return room
    return None


def _cannot_write(host: Host, candidate: Candidate) -> str | None:
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
        return say("the recording is not readable there")
    if owner is None:  # not recorded: a room or a folder there is all that is known
        known = _room(host, path, path) is not None or host.exists(path)
        return None if known else say("does not exist")
    uid, mode = owner
    ours = host.uid == 0 or (uid == host.uid and mode & 0o200) or mode & 0o002
    return None if ours else say("not writable")


def _working_directory(host: Host) -> str | None:
    if host.live and host.root == Path("/"):
        try:
            return os.getcwd()
        except OSError:  # removed under us
            return None
    recorded = (host.recording or {}).get("cwd") or host.env.get("PWD")
    return recorded if isinstance(recorded, str) else None


def _absolute(host: Host, path: str) -> str:
    folder = _working_directory(host)
    return path if os.path.isabs(path) or folder is None else os.path.join(folder, path)


def _below(path: str, point: str) -> bool:
    return path == point or path.startswith(point.rstrip("/") + "/")


def _pure(path: str) -> PurePosixPath | Path:
    return PurePosixPath(path) if path.startswith("/") else Path(path)
