"""A data file opened for reading at any place, and the words for a file that cannot be opened.

Covers: missing files, dangling links, directories, devices, permissions; reads at an offset that either give
all the bytes asked for or say that the file is cut short. Does not cover: what the bytes mean.

A SourceFile owns one descriptor. Reads take an offset and never move a shared position, so threads may read
from one SourceFile at the same time.
"""

from __future__ import annotations

import errno
import io
import os
import stat
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Self

from legroom.errors import DamagedSource, UnreadableSource
from legroom.units import format_size
from legroom.words import say

_MOST_AT_ONCE = 1 << 30  # macOS refuses reads of 2 GB and more


class SourceFile:
    """One regular file, open for reading."""

    def __init__(self, path: Path) -> None:
        self.path = path
        require_regular(path)
        try:
            self._file = path.open("rb", buffering=0)
            try:
                self.size = os.fstat(self._file.fileno()).st_size
            except BaseException:
                self._file.close()
                raise
        except OSError as problem:
            raise unreadable(path, problem) from problem
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Its descriptor."""
        return self._file.fileno()

    @property
    def alias(self) -> str:
        """A path for libraries that open files by name: of the file that is open here, whatever its own name leads to
        by now."""
        return alias(self.fileno()) or os.fspath(self.path)

    def read_at(self, offset: int, count: int) -> bytes:
        """Exactly ``count`` bytes from ``offset``."""
        self.require(offset, count)
        if hasattr(os, "pread") and count <= _MOST_AT_ONCE:
            try:
                data = os.pread(self._file.fileno(), count, offset)  # no buffer to clear and copy from
            except OSError as problem:
                raise unreadable(self.path, problem) from problem
            if len(data) == count:
                return data
        buffer = bytearray(count)
        self.read_into(offset, memoryview(buffer))
        return bytes(buffer)

    def read_into(self, offset: int, view: memoryview) -> None:
        """Fill ``view`` from ``offset``."""
        done = 0
        while done < len(view):
            try:
                got = self._read_some(offset + done, view[done : done + _MOST_AT_ONCE])
            except OSError as problem:
                raise unreadable(self.path, problem) from problem
            if got == 0:
                raise cut_short(self.path, offset + len(view), offset + done)
            done += got

    def _read_some(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:  # Windows: one position for everybody
            self._file.seek(offset)
            return self._file.readinto(view) or 0

    @contextmanager
    def as_stream(self) -> Iterator[BinaryIO]:
        """The file from its beginning, for libraries that want to read it themselves; closing it closes nothing.

        What cannot be read is raised as such, whatever the library makes of it.
        """
        stream = _Stream(self)
        try:
            yield io.BufferedReader(stream)
        except Exception:
            if stream.problem is not None:
                raise stream.problem from None
            raise

    def require(self, offset: int, count: int) -> None:
        """Refuse a range that the file does not have, before memory is taken for it."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise cut_short(self.path, offset + count, self.size)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def absolute(path: str | os.PathLike[str]) -> Path:
    """The path from the root on, for later: of the same file, whatever the working directory is then.

    ``..`` is resolved as the kernel does it: after a symbolic link it is not the directory that the link lies in.
    """
    text = os.fspath(path) if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    head, dots, tail = text.rpartition("/../")
    if dots:
        text = os.path.join(os.path.realpath(head + "/.."), tail)
    return Path(os.path.realpath(text) if text.endswith("/..") else text)


def alias(descriptor: int) -> str | None:
    """A path to what a descriptor is open on; None where the system has none."""
    path = f"/proc/self/fd/{descriptor}"
    return path if os.path.exists(path) else None


class _Stream(io.RawIOBase):
    """A position of its own in a SourceFile."""

    def __init__(self, file: SourceFile) -> None:
        super().__init__()
        self._file, self._at = file, 0
        self.problem: UnreadableSource | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._file.size}[whence]
        if start + offset < 0:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as a file's own
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        count = max(0, min(len(view), self._file.size - self._at))
        try:
            self._file.read_into(self._at, view[:count])
        except UnreadableSource as problem:
            self.problem = problem
            raise
        self._at += count
        return count


def require_regular(path: Path) -> os.stat_result:
    """The file's stat, or the error that says why it is not a file to read."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem
    if not stat.S_ISREG(found.st_mode):
        kind = say("a directory") if stat.S_ISDIR(found.st_mode) else say("not a regular file")
        raise UnreadableSource(
            say("cannot read {path}", path=path),
            why=say("it is {kind}", kind=kind),
            fix=(say("name a data file, or the directory of a Zarr store"),),
        )
    return found


def unreadable(path: Path, problem: Exception) -> UnreadableSource:
    """Why that path cannot be opened or read, in words."""
    what = say("cannot read {path}", path=path)
    if isinstance(problem, FileNotFoundError):
        if target := _dangling(path):
            return UnreadableSource(
                what,
                why=say("it is a link to {target}, which does not exist", target=target),
                fix=(say("restore the file the link points to, or point the link elsewhere"),),
            )
        return UnreadableSource(
            what,
            why=say("there is no such file"),
            fix=(say("look for it:\nls {folder}", folder=path.parent),),
        )
    if isinstance(problem, PermissionError):
        return UnreadableSource(
            what,
            why=say("this user may not read it"),
            fix=(say("see who may:\nls -l {path}", path=path), say("ask its owner for read permission")),
        )
    reason = getattr(problem, "strerror", None) or str(problem)
    return UnreadableSource(
        what, why=reason, fix=(say("check the path and its filesystem:\nls -l {path}", path=path),)
    )


def _dangling(path: Path) -> str | None:
    """Where the first broken link on the way to ``path`` points, or None where no link is at fault."""
    for step in (path, *path.parents):
        try:
            target = os.readlink(step)
        except (OSError, ValueError):
            continue
        if not step.exists():
            return os.path.normpath(step.parent / target)
    return None


def cut_short(path: Path, needed: int, size: int) -> DamagedSource:
    """The error for a file that ends before its data do."""
    return DamagedSource(
        say("{path} is cut short", path=path),
        why=say(
            "its data go on to byte {needed}, the file ends at byte {size} ({missing} missing)",
            needed=needed,
            size=size,
            missing=format_size(max(0, needed - size)),
        ),
        fix=(say("copy or download the file again and compare its size with the original's"),),
    )


def damaged(path: Path, why: str) -> DamagedSource:
    """The error for a file that breaks the rules of its own format."""
    return DamagedSource(
        say("{path} is damaged", path=path),
        why=why,
        fix=(say("copy or download the file again, or write it anew from its source"),),
    )


def wrong_checksum(path: Path, name: str, has: int, needed: int) -> DamagedSource:
    """The error for bytes that are not those the file's own CRC-32 was taken of."""
    return damaged(
        path,
        say(
            "the checksum of {name!r} is {has:08x}, the archive says {needed:08x}",
            name=name, has=has, needed=needed,
        ),
    )  # fmt: skip
