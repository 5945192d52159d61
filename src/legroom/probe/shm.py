"""The tmpfs at /dev/shm: its size, its rights, what takes its room.

Covers: the mount, every file with a name, deleted files that are still held, whether logging out empties it.
Does not cover: whether its size is enough (budget), or the memory behind it (memory.py).
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from legroom.model import Pool, Process, Shm
from legroom.probe import process
from legroom.probe.files import files_below
from legroom.probe.host import Host
from legroom.probe.leftovers import Users, leftovers
from legroom.probe.logind import removed_at_logout
from legroom.probe.mounts import Mount
from legroom.probe.segments import SHM, Segments, is_memory, shm_mount
from legroom.words import say


def shm(host: Host, processes: Sequence[Process] | None = None) -> Shm:
    """Everything about /dev/shm; ``processes`` spares a second look at everybody."""
    if host.platform != "linux":
        why = say("{platform} has no /dev/shm", platform=host.platform)
        return Shm(SHM, False, None, None, None, None, None, None, source="", reason=why)
    path, mount = shm_mount(host)
    mounted = mount is not None and is_memory(mount)
    # Files are listed before processes are: what is listed already has its user, if it ever had one.
    listing = files_below(host, path)
    size, used, free, reason = shm_room(host, path)
    everybody = process.processes(host) if processes is None else processes
    users = Users(Segments.of(host), listing, used if mounted else None)
    users.look(everybody)
    if listing.cut and reason is None:
        reason = say("more than {count} files: the rest was not looked at", count=len(listing.files))
    owner, mode = host.owner_mode(path) or (None, None)
    removed, how = removed_at_logout(host)
    return Shm(
        path=SHM,
        mounted=mounted,
        size=size,
        used=used,
        free=free,
        mode=mode,
        owner=owner,
        writable=_writable(host, path, mount),
        source=_source(path, mount, mounted),
        files=leftovers(host, everybody, users),
        hidden=users.hidden(),
        unlinked=users.unlinked(),
        unreadable_processes=len(users.closed),
        removed_at_logout=removed,
        removed_how=how,
        reason=reason,
    )


def shm_pool(shm: Shm) -> Pool:
    """/dev/shm as a pool."""
    return Pool("shm", shm.size, shm.used, shm.free, shm.source, shm.reason)


def shm_room(host: Host, path: str) -> tuple[int | None, int | None, int | None, str | None]:
    """(size, used, free, why unknown) of the filesystem at ``path``: the one look that is cheap."""
    room = host.room(path)
    if room is None:
        if not host.exists(path):
            return None, None, None, say("{path} does not exist", path=path)
        return None, None, None, say("{path} cannot be asked for its room", path=path)
    size, free, used = room
    if size == 0:  # mounted with size=0, or ramfs
        return None, None, None, say("{path} has no size of its own: only memory bounds it", path=path)
    return size, used, free, None


def _source(path: str, mount: Mount | None, mounted: bool) -> str:
    if mounted:
        return say("statvfs({path}), /proc/self/mountinfo", path=path)
    if mount is not None:
        return say("statvfs({path}), which is {kind}, not tmpfs", path=path, kind=mount.kind)
    return say("statvfs({path}), a directory without a filesystem of its own", path=path)


def _writable(host: Host, path: str, mount: Mount | None) -> bool | None:
    if mount is not None and "ro" in (*mount.options, *mount.super_options):
        return False
    if host.live:
        if not host.exists(path):
            return None
        return os.access(
            host.path(path), os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids
        )
    facts = host.owner_mode(path)
    if facts is None or host.uid is None:
        return None
    owner, mode = facts
    bits = 0o300 if host.uid == owner else 0o003
    return host.uid == 0 or mode & bits == bits
