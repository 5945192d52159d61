"""Stamps of files: the stat fields that identify their content. Of one file, and of all files below a directory.

A directory may hold millions of files, so their stamps and names lie one after the other in two buffers.
"""

from __future__ import annotations

import hashlib
import os
import stat
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from legroom.cache.mapped_files_and_checksums import opened
from legroom.errors import UnreadableSource
from legroom.formats.file_reads_and_errors import (
    distinct_size,
    latest_times,
    pack_fields,
    packed_stamp,
    require_regular,
    unpacked_stamp,
    unreadable,
)
from legroom.messages import say
from legroom.remote.remote_object import ObjectStamp, ObjectUrl, SourcePath
from legroom.system.lazy_and_optional_imports import import_lock

_MOST_AGAIN = 10_000  # n directories with two links each to the next have 2^n names


@dataclass(frozen=True, slots=True)
class Stamp:
    """The stat fields that identify a file's content: two equal stamps are taken for the same bytes."""

    dev: int
    ino: int
    size: int
    mtime_ns: int
    ctime_ns: int

    @classmethod
    def of(cls, stats: os.stat_result) -> Stamp:
        return cls(stats.st_dev, stats.st_ino, stats.st_size, stats.st_mtime_ns, stats.st_ctime_ns)

    def __str__(self) -> str:
        return f"{self.dev}-{self.ino}-{self.size}-{self.mtime_ns}-{self.ctime_ns}"


@dataclass(frozen=True, slots=True)
class StampedFile:
    """One file, or remote object, of a source: its name in the digest, and its stamp."""

    name: str
    path: SourcePath
    stamp: Stamp | ObjectStamp
    local: Path | None = None  # where a remote object's bytes arrive on this machine
    doubted: str | None = None  # the digest of an earlier download that was not as expected

    @property
    def readable(self) -> Path:
        """The file on this machine that has its bytes."""
        if self.local is None and isinstance(self.path, ObjectUrl):
            raise ValueError(f"{self.path} is not on this machine")
        return self.local or Path(self.path)

    @property
    def size(self) -> int:
        return self.stamp.size or 0

    @property
    def changed_ns(self) -> int:
        if isinstance(self.stamp, ObjectStamp):
            return self.stamp.changed_ns
        return max(self.stamp.ctime_ns, self.stamp.mtime_ns)


class StampedFolder(Sequence[StampedFile]):
    """The files below a directory, sorted by name. About 100 bytes each: a StampedFile takes ten times that."""

    def __init__(self, path: Path, name: str) -> None:
        self.path, self.name = path, name
        self._names, self._ends = bytearray(), array("Q")  # relative to the path
        self._stamps = bytearray()

    def add(self, relative: str, stats: os.stat_result) -> None:
        """Add the next file."""
        self._names += os.fsencode(relative)
        self._ends.append(len(self._names))
        self._stamps += packed_stamp(stats)

    def __len__(self) -> int:
        return len(self._ends)

    @overload
    def __getitem__(self, index: int) -> StampedFile: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[StampedFile]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        if not 0 <= index < len(self):
            raise IndexError(index)
        relative = os.fsdecode(bytes(self._names[self._ends[index - 1] if index else 0 : self._ends[index]]))
        name = f"{self.name}/{relative}" if self.name else relative
        return StampedFile(name, self.path / relative, Stamp(*unpacked_stamp(self._stamps, index)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StampedFolder) and (self.path, self.name, self.digest) == (
            other.path,
            other.name,
            other.digest,
        )

    def __hash__(self) -> int:
        return hash(self.digest)

    @property
    def digest(self) -> str:
        """A hash of all names and stamps."""
        hasher = hashlib.blake2b(digest_size=16)
        for part in (self._names, self._ends, self._stamps):
            hasher.update(part)
        return hasher.hexdigest()

    @property
    def packed_stamps(self) -> bytearray:
        """The stamps of all files, one after the other."""
        return self._stamps

    @property
    def size(self) -> int:
        """Bytes of all files; one with several names counts once."""
        return distinct_size(self._stamps)

    @property
    def ctime_ns(self) -> int:
        """The latest ctime of all files."""
        return latest_times(self._stamps)[1]

    @property
    def changed_ns(self) -> int:
        """When the last of the files changed."""
        return max(latest_times(self._stamps))


def stamp_file(path: Path, name: str | None = None) -> StampedFile:
    """Stamp one regular file, from its descriptor."""
    return StampedFile(name or path.name, path, Stamp.of(_stat_file(path)))


def _stat_file(path: str | Path) -> os.stat_result:
    try:
        with opened(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)) as fd:
            stats = os.fstat(fd)
    except OSError as problem:
        raise unreadable(Path(path), problem) from problem
    if not stat.S_ISREG(stats.st_mode):
        require_regular(Path(path))  # raises with the kind of file
    return stats


def is_folder(path: Path) -> bool:
    """Whether a path is a directory."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except OSError as problem:
        raise unreadable(path, problem) from problem


def stamp_folder(path: Path, name: str, folders: list[StampedFile]) -> StampedFolder:
    """Stamp the files of a directory that its format names, or everything below it, following symbolic links."""
    with import_lock:  # imported here: it imports the readers' base class, which attaching does not need
        from legroom.formats.detect import directory_files

    found = StampedFolder(path, name)
    named = directory_files(path)
    if named is not None:
        for relative in sorted(one.relative_to(path).as_posix() for one in named):
            found.add(relative, _stat_file(path / relative))
        return found
    # Names relative to the folder: a renamed or copied folder is the same data.
    waiting: list[tuple[str, frozenset[tuple[int, int]] | None]] = [("", frozenset())]  # None: a file
    reached: set[tuple[int, int]] = set()
    again = 0
    while waiting:
        here, above = waiting.pop()
        full = os.path.join(path, here) if here else os.fspath(path)
        if above is None:
            found.add(here, _stat_file(full))
            continue
        try:
            stats = os.stat(full)
            called = (Path(name) / here).as_posix() + "/"
            folders.append(StampedFile(called, Path(full), Stamp.of(stats)))
            with os.scandir(full) as listing:
                # With its slash a directory sorts where the paths of its files do.
                children = sorted((one.name + "/" if one.is_dir() else one.name) for one in listing)
        except OSError as problem:
            raise unreadable(Path(full), problem) from problem
        this = stats.st_dev, stats.st_ino
        again += this in reached
        reached.add(this)
        if this in above or again > _MOST_AGAIN:
            raise UnreadableSource(
                say("cannot read {path}", path=path),
                why=say("{folder} is a link to one of its own parent directories", folder=full)
                if this in above
                else say("symbolic links lead to the same directories more than {most} times", most=_MOST_AGAIN),
                fix=(say("remove the symbolic links"),),
            )
        inside = above | {this}
        prefix = here + "/" if here else ""
        waiting += [
            (prefix + child.rstrip("/"), inside if child.endswith("/") else None) for child in reversed(children)
        ]
    return found


def packed(file: StampedFile) -> bytes:
    """The stamp of a file as readers of directories compare it; nothing for a remote object."""
    stamp = file.stamp
    if not isinstance(stamp, Stamp):
        return b""
    return pack_fields(stamp.dev, stamp.ino, stamp.size, stamp.mtime_ns, stamp.ctime_ns)
