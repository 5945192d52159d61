"""The files in /dev/shm, and whether any living process still uses them.

Covers: who makes files of which name, who holds them, what is held without a name.
Does not cover: the mount they lie on (shm.py), removing them (nobody here does).

As few reads as will do, because a process's maps cost ten times its descriptors: first the descriptors of the
processes that have shared pages (RssShmem), then their maps, then everybody's, and no more once all is explained.
"""

from __future__ import annotations

import re
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from legroom.model import Leftover, Process
from legroom.probe.files import File, Listing, has_writer
from legroom.probe.host import Host
from legroom.probe.process import plain, started_at
from legroom.probe.segments import Segments

_KINDS = (
    ("torch", re.compile(r"torch_")),
    ("python", re.compile(r"psm_|wnsm_")),
    ("semaphore", re.compile(r"sem\.")),
    ("nccl", re.compile(r"nccl-")),
    ("legroom", re.compile(r"legroom-[0-9]+/")),
)
# Those whose makers always open them for writing: without a writer they have no user. Others may be read-only.
_WRITTEN = frozenset({"torch", "python", "semaphore", "nccl"})
_TORCH_MAKER = re.compile(r"torch_([0-9]{1,10})_", re.A)
_MANAGER = "torch_shm_manager"


def kind_of(name: str) -> str:
    """Who makes files of that name: torch, python, semaphore, nccl, legroom or other."""
    return next((kind for kind, pattern in _KINDS if pattern.match(name)), "other")


def maker_of(name: str) -> int | None:
    """The process whose id is in the name of a file of torch's."""
    match = _TORCH_MAKER.match(name)
    return int(match[1]) if match else None


@dataclass
class Users:
    """Which files of one /dev/shm living processes hold."""

    segments: Segments
    listing: Listing
    used: int | None  # of the whole filesystem; None where that says nothing
    held: set[int] = field(default_factory=set)  # inodes
    closed: set[int] = field(default_factory=set)  # pids that may not be looked into
    _unheld: set[int] = field(default_factory=set)  # files with names that nobody was seen to hold so far
    _unexplained: int | None = None  # bytes, so far

    def look(self, everybody: Sequence[Process]) -> None:
        """Look at processes until everything is explained or everybody was looked at."""
        self.segments.know(self.listing.files)
        self._unexplained = self.hidden()
        # A Legroom store's lock files wait for users without taking room: no reason to look at everybody.
        self._unheld = {f.inode for f in self.listing.files if f.size or kind_of(self.name(f)) != "legroom"}
        # Trainers first: they map what all their workers share.
        parents = {process.parent for process in everybody}
        ordered = sorted(everybody, key=lambda process: process.pid not in parents)
        likely = [p.pid for p in ordered if p.rss_shmem is None or p.rss_shmem > 0]
        rest = [p.pid for p in ordered if p.rss_shmem == 0]
        opened, mapped = self.segments.opened, self.segments.mapped
        for pids, look in ((likely, opened), (likely, mapped), (rest, opened), (rest, mapped)):
            for pid in pids:
                if self._explained():
                    return
                self._hold(pid, look(pid))

    def name(self, file: File) -> str:
        """A file's name below /dev/shm."""
        return file.path.removeprefix(self.segments.path + "/")

    def _hold(self, pid: int, found: Iterable[int] | None) -> None:
        if found is None:
            self.closed.add(pid)
            return
        new = set(found) - self.held
        self.held |= new
        nameless = new - self._unheld
        self._unheld -= new
        if self._unexplained is not None:
            self._unexplained -= self.segments.total(nameless) or 0

    def _explained(self) -> bool:
        # A running loader moves things between two reads: one part in 256 is as good as nothing.
        left, used = self._unexplained, self.used
        return not self._unheld and (left is None or used is None or left * 256 <= used)

    def unlinked(self) -> int | None:
        """What held files without a name take; None where that could not be had for one of them."""
        return self.segments.total(self.held - {file.inode for file in self.listing.files})

    def hidden(self) -> int | None:
        """What is used and explained neither by a file with a name nor by a process that holds one without."""
        unlinked = self.unlinked()
        if self.used is None or self.listing.cut or unlinked is None:
            return None
        named = {file.inode: file.size for file in self.listing.files}  # hard links count once
        return max(0, self.used - sum(named.values()) - unlinked)


def leftovers(host: Host, everybody: Sequence[Process], users: Users) -> tuple[Leftover, ...]:
    """Every file with a name, the largest first; each user's Legroom store as one."""
    names = [users.name(file) for file in users.listing.files]
    makers = makers_alive(host, names, {process.pid for process in everybody})
    managers = _managers(host, everybody, users.segments)
    found: list[Leftover] = []
    stores: dict[str, list[tuple[File, bool | None]]] = {}
    for file, name in zip(users.listing.files, names, strict=True):
        kind = kind_of(name)
        on_way = on_its_way(file, name, makers)
        used = True if on_way else _in_use(host, file, kind, users, managers)
        if kind == "legroom":
            stores.setdefault(name.partition("/")[0], []).append((file, used))
        else:
            age = max(0.0, host.now - file.mtime)
            found.append(Leftover(plain(name), kind, file.size, age, used, file.owner))
    found += [_store(host, name, group) for name, group in stores.items()]
    return tuple(sorted(found, key=lambda file: (-file.size, file.name)))


def _store(host: Host, name: str, group: Sequence[tuple[File, bool | None]]) -> Leftover:
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
    """When each living maker of those files of torch's began; None where that cannot be read."""
    makers = {maker for name in names if (maker := maker_of(name)) is not None and maker in living}
    return {maker: started_at(host, maker) for maker in makers}


def on_its_way(file: File, name: str, makers: Mapping[int, float | None]) -> bool:
    """Whether a segment of torch's may wait to be fetched, held by nobody ("file_system" sharing).

    Its name tells its maker, which must live; a process younger than the file only has the same id.
    """
    maker = maker_of(name)
    if maker is None or maker not in makers:
        return False
    began = makers[maker]
    return began is None or began <= file.mtime + 1


def _managers(host: Host, everybody: Sequence[Process], segments: Segments) -> list[tuple[int | None, float]]:
    """(user, when it began) of each process of torch's that deletes what nobody fetches from this /dev/shm."""
    found = []
    for process in everybody:
        if process.command.partition(" ")[0].endswith(_MANAGER):
            theirs = Segments.of(host, process.pid).device
            if theirs in (None, segments.device):  # None: it does not let us look
                found.append((process.uid, started_at(host, process.pid) or 0.0))
    return found


def _in_use(
    host: Host, file: File, kind: str, users: Users, managers: Sequence[tuple[int | None, float]]
) -> bool | None:
    """True only where a user is known, False only where there can be none."""
    if file.inode in users.held:
        return True
    writer = has_writer(host, file.path)
    if writer:
        return True
    # Ids in names are those of the maker's own container: the maker may live and not be recognised. Its manager is.
    if kind == "torch" and any(uid == file.owner and began <= file.mtime + 1 for uid, began in managers):
        return None
    if writer is False and kind in _WRITTEN:
        return False
    return None if users.closed else False
