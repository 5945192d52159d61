"""/dev/shm: its size and permissions, the files in it, which processes hold them, and whether logout deletes them.

Reading a process's maps takes ten times as long as its descriptors. So the descriptors of processes with shared pages
(RssShmem) are read first, then their maps, then those of all others, until every byte is explained.
"""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from legroom.messages import say
from legroom.probe.filesystems_and_cgroups import Mount
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.process_and_limits import plain, processes, started_at
from legroom.probe.shm_segments import (
    SHM,
    FileFacts,
    FileListing,
    Segments,
    files_below,
    has_writer,
    is_memory,
    shm_mount,
)
from legroom.records.machine import Leftover, Pool, Process, Shm
from legroom.system.lazy_and_optional_imports import import_lock


def shm(host: Host, all_processes: Sequence[Process] | None = None) -> Shm:
    """Everything about /dev/shm; ``all_processes`` spares reading them again."""
    if host.platform != "linux":
        why = say("{platform} has no /dev/shm", platform=host.platform)
        return Shm(SHM, False, None, None, None, None, None, None, source="", reason=why)
    path, mount = shm_mount(host)
    mounted = mount is not None and is_memory(mount)
    # Files are listed before processes: a listed file already has its user, if it has one.
    listing = files_below(host, path)
    pool = shm_space(host, path)
    reason = pool.reason
    all_processes = processes(host) if all_processes is None else all_processes
    holders = SegmentHolders(Segments.of(host), listing, pool.used if mounted else None)
    holders.find(all_processes)
    if listing.cut and reason is None:
        reason = say("more than {count} files: the rest was not read", count=len(listing.files))
    owner, mode = host.owner_mode(path) or (None, None)
    removed, how = removed_at_logout(host)
    return Shm(
        path=SHM,
        mounted=mounted,
        size=pool.size,
        used=pool.used,
        free=pool.free,
        mode=mode,
        owner=owner,
        writable=_writable(host, path, mount),
        source=_source(path, mount, mounted),
        files=leftovers(host, all_processes, holders),
        hidden=holders.hidden(),
        unlinked=holders.unlinked(),
        unreadable_processes=len(holders.unreadable),
        removed_at_logout=removed,
        removed_how=how,
        reason=reason,
    )


def shm_pool(shm: Shm) -> Pool:
    """/dev/shm as a pool."""
    return Pool("shm", shm.size, shm.used, shm.free, shm.source, shm.reason)


def shm_space(host: Host, path: str) -> Pool:
    """The filesystem at ``path`` as a pool: cheap, since no file and no process is read."""
    space, source = host.disk_space(path), f"statvfs({path})"
    if space is not None and space.size:
        return Pool("shm", space.size, space.used, space.free, source)
    if space is not None:  # mounted with size=0, or ramfs
        why = say("{path} has no size limit: only RAM limits it", path=path)
    elif host.exists(path):
        why = say("cannot read the free space of {path}", path=path)
    else:
        why = say("{path} does not exist", path=path)
    return Pool("shm", None, None, None, source, why)


def _source(path: str, mount: Mount | None, mounted: bool) -> str:
    if mounted:
        return f"statvfs({path}), /proc/self/mountinfo"
    if mount is not None:
        return say("statvfs({path}), which is {kind}, not tmpfs", path=path, kind=mount.kind)
    return say("statvfs({path}), a directory, not a mount", path=path)


def _writable(host: Host, path: str, mount: Mount | None) -> bool | None:
    if mount is not None and "ro" in (*mount.options, *mount.super_options):
        return False
    if host.live:
        if not host.exists(path):
            return None
        return os.access(host.path(path), os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)
    facts = host.owner_mode(path)
    if facts is None or host.uid is None:
        return None
    owner, mode = facts
    bits = 0o300 if host.uid == owner else 0o003
    return host.uid == 0 or mode & bits == bits


_KINDS = (
    ("torch", re.compile(r"torch_")),
    ("python", re.compile(r"psm_|wnsm_")),
    ("semaphore", re.compile(r"sem\.")),
    ("nccl", re.compile(r"nccl-")),
    ("legroom", re.compile(r"legroom-[0-9]+/")),
)
# Kinds that are always open for writing while used: without a writer they are unused. Others may be read-only.
_WRITTEN = frozenset({"torch", "python", "semaphore", "nccl"})
_TORCH_MAKER = re.compile(r"torch_([0-9]{1,10})_", re.A)
_MANAGER = "torch_shm_manager"


def kind_of(name: str) -> str:
    """What creates files of that name: torch, python, semaphore, nccl, legroom or other."""
    return next((kind for kind, pattern in _KINDS if pattern.match(name)), "other")


def maker_of(name: str) -> int | None:
    """The pid in the name of a torch segment."""
    match = _TORCH_MAKER.match(name)
    return int(match[1]) if match else None


@dataclass
class SegmentHolders:
    """Which files of one /dev/shm are used by processes."""

    segments: Segments
    listing: FileListing
    used: int | None  # of the whole filesystem; None where that is unknown
    held: set[int] = field(default_factory=set)  # inodes
    unreadable: set[int] = field(default_factory=set)  # pids that may not be read
    _unheld: set[int] = field(default_factory=set)  # named files for which no user was found so far
    _unexplained: int | None = None  # bytes, so far

    def find(self, all_processes: Sequence[Process]) -> None:
        """Read processes until every byte is explained or all have been read."""
        self.segments.know(self.listing.files)
        self._unexplained = self.hidden()
        # Lock files of a Legroom store may have no user and take no space: no reason to read every process.
        self._unheld = {f.inode for f in self.listing.files if f.size or kind_of(self.name(f)) != "legroom"}
        # Training processes first: they map what all their workers share.
        parents = {process.parent for process in all_processes}
        ordered = sorted(all_processes, key=lambda process: process.pid not in parents)
        likely = [p.pid for p in ordered if p.rss_shmem is None or p.rss_shmem > 0]
        rest = [p.pid for p in ordered if p.rss_shmem == 0]
        opened, mapped = self.segments.opened, self.segments.mapped
        for pids, read in ((likely, opened), (likely, mapped), (rest, opened), (rest, mapped)):
            for pid in pids:
                if self._explained():
                    return
                self._add(pid, read(pid))

    def name(self, file: FileFacts) -> str:
        """A file's name below /dev/shm."""
        return file.path.removeprefix(self.segments.path + "/")

    def _add(self, pid: int, found: Iterable[int] | None) -> None:
        if found is None:
            self.unreadable.add(pid)
            return
        new = set(found) - self.held
        self.held |= new
        nameless = new - self._unheld
        self._unheld -= new
        if self._unexplained is not None:
            self._unexplained -= self.segments.total(nameless) or 0

    def _explained(self) -> bool:
        # A running DataLoader changes files between two reads: ignore 1/256.
        left, used = self._unexplained, self.used
        return not self._unheld and (left is None or used is None or left * 256 <= used)

    def unlinked(self) -> int | None:
        """Bytes of deleted files that are still used; None if one size is unknown."""
        return self.segments.total(self.held - {file.inode for file in self.listing.files})

    def hidden(self) -> int | None:
        """Bytes in use that neither named files nor deleted files in use explain."""
        unlinked = self.unlinked()
        if self.used is None or self.listing.cut or unlinked is None:
            return None
        named = {file.inode: file.size for file in self.listing.files}  # hard links count once
        return max(0, self.used - sum(named.values()) - unlinked)


def leftovers(host: Host, all_processes: Sequence[Process], holders: SegmentHolders) -> tuple[Leftover, ...]:
    """Every named file, largest first; each user's Legroom store as one."""
    names = [holders.name(file) for file in holders.listing.files]
    makers = makers_alive(host, names, {process.pid for process in all_processes})
    managers = _managers(host, all_processes, holders.segments)
    found: list[Leftover] = []
    stores: dict[str, list[tuple[FileFacts, bool | None]]] = {}
    for file, name in zip(holders.listing.files, names, strict=True):
        kind = kind_of(name)
        on_way = on_its_way(file, name, makers)
        used = True if on_way else _in_use(host, file, kind, holders, managers)
        if kind == "legroom":
            stores.setdefault(name.partition("/")[0], []).append((file, used))
        else:
            age = max(0.0, host.now - file.mtime)
            found.append(Leftover(plain(name), kind, file.size, age, used, file.owner))
    found += [_store(host, name, group) for name, group in stores.items()]
    return tuple(sorted(found, key=lambda file: (-file.size, file.name)))


def _store(host: Host, name: str, group: Sequence[tuple[FileFacts, bool | None]]) -> Leftover:
    answers = {used for _, used in group}
    return Leftover(
        name,
        "legroom",
        size=sum({file.inode: file.size for file, _ in group}.values()),
        age=max(0.0, host.now - max(file.mtime for file, _ in group)),
        mapped=True if True in answers else None if None in answers else False,
        owner=group[0][0].owner,
    )


def makers_alive(host: Host, names: Iterable[str], living: Container[int]) -> dict[int, float | None]:
    """Start time of each running process that created those torch segments; None if unknown."""
    makers = {maker for name in names if (maker := maker_of(name)) is not None and maker in living}
    return {maker: started_at(host, maker) for maker in makers}


def on_its_way(file: FileFacts, name: str, makers: Mapping[int, float | None]) -> bool:
    """Whether a torch segment may be in flight, used by no process yet ("file_system" sharing).

    Its name contains the pid of its creator, which must be running and older than the file.
    """
    maker = maker_of(name)
    if maker is None or maker not in makers:
        return False
    began = makers[maker]
    return began is None or began <= file.mtime + 1


def _managers(host: Host, all_processes: Sequence[Process], segments: Segments) -> list[tuple[int | None, float]]:
    """(user, start time) of each torch_shm_manager, which deletes unreceived segments from this /dev/shm."""
    found = []
    for process in all_processes:
        if process.command.partition(" ")[0].endswith(_MANAGER):
            theirs = Segments.of(host, process.pid).device
            if theirs in (None, segments.device):  # None: not readable
                found.append((process.uid, started_at(host, process.pid) or 0.0))
    return found


def _in_use(
    host: Host, file: FileFacts, kind: str, holders: SegmentHolders, managers: Sequence[tuple[int | None, float]]
) -> bool | None:
    """True if a user is known, False if there can be none, else None."""
    if file.inode in holders.held:
        return True
    writer = has_writer(host, file.path)
    if writer:
        return True
    # Pids in names are those of the creator's container, so the creator may not be recognised. Its manager is.
    if kind == "torch" and any(uid == file.owner and began <= file.mtime + 1 for uid, began in managers):
        return None
    if writer is False and kind in _WRITTEN:
        return False
    return None if holders.unreadable else False


_HOMES = ("/etc/systemd", "/run/systemd", "/usr/local/lib/systemd", "/usr/lib/systemd", "/lib/systemd")
_LINGER = "/var/lib/systemd/linger"
_FIRST_PERSON = 1000  # below are system users, whose files logind keeps
_YES = frozenset({"1", "yes", "y", "true", "t", "on"})
_NO = frozenset({"0", "no", "n", "false", "f", "off"})


def removed_at_logout(host: Host) -> tuple[bool | None, str]:
    """Whether this user's files in /dev/shm are deleted at the last logout, and the source of that."""
    uid = host.uid
    if uid is None:
        return None, say("this user has no numeric id")
    if not host.exists("/run/systemd/system"):
        return False, say("systemd is not running (/run/systemd/system does not exist)")
    if uid < _FIRST_PERSON:
        return False, say("uid {uid} is a system user, whose files logind keeps", uid=uid)
    removes, where = _setting(host)
    if not removes:
        return False, say("RemoveIPC=no ({where})", where=where)
    lingering = host.names(_LINGER)
    if lingering:
        name = _user_name(host, uid)
        if name is None:
            why = say("RemoveIPC=yes ({where}); uid {uid} has no user name to look up", where=where, uid=uid)
            return None, say("{why} in {linger}", why=why, linger=_LINGER)
        if name in lingering:
            return False, say("lingering is on for {name} ({linger}/{name} exists)", name=name, linger=_LINGER)
    return True, say("RemoveIPC=yes ({where}), and lingering is off for uid {uid}", where=where, uid=uid)


def _setting(host: Host) -> tuple[bool, str]:
    value, where = True, say("systemd's default")
    for home in _HOMES:
        path = f"{home}/logind.conf"
        text = host.text(path)
        if text is None:
            continue
        value, where = _default(text, path) or (value, where)
        if (set_here := parse_remove_ipc(text)) is not None:
            value, where = set_here, path
        break
    drop_ins: dict[str, str] = {}
    for home in _HOMES:
        for name in host.names(f"{home}/logind.conf.d"):
            if name.endswith(".conf"):
                drop_ins.setdefault(name, f"{home}/logind.conf.d/{name}")
    for _, path in sorted(drop_ins.items()):
        if (set_here := parse_remove_ipc(host.text(path) or "")) is not None:
            value, where = set_here, path
    return value, where


def parse_remove_ipc(text: str) -> bool | None:
    """The value of RemoveIPC in a logind configuration; None if not set."""
    found, section = None, ""
    for line in text.split("\n"):
        line = line.strip()
        if line.startswith("[") and line.endswith("]"):
            section = line[1:-1]
        elif section == "Login" and line[:1] not in ("#", ";"):
            key, equals, value = line.partition("=")
            if equals and key.rstrip() == "RemoveIPC":
                word = value.strip().lower()
                found = True if word in _YES else False if word in _NO else found
    return found


def _default(text: str, path: str) -> tuple[bool, str] | None:
    """The default that this systemd was built with: the shipped file has it as a comment, and some ship ``no``."""
    lines = text.split("\n")
    if not any("compile time defaults" in line or "compile-time defaults" in line for line in lines):
        return None
    shown = parse_remove_ipc("\n".join(line.removeprefix("#") for line in lines if line[:2] in ("[L", "#R")))
    return None if shown is None else (shown, say("the default shown in {path}", path=path))


def _user_name(host: Host, uid: int) -> str | None:
    for line in (host.text("/etc/passwd") or "").split("\n"):
        fields = line.split(":")
        if len(fields) > 2 and fields[2] == str(uid):
            return fields[0]
    if not host.live:
        return None
    try:
        with import_lock:
            import pwd

        return pwd.getpwuid(uid).pw_name  # a user of a directory service is in no file
    except (ImportError, KeyError):
        return None
