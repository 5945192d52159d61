"""A data file read at offsets, the files of a directory, and the errors for missing, unreadable or damaged ones.

A SourceFile owns one file descriptor. Reads take an offset and move no shared position, so threads can read from one
SourceFile at the same time. A read returns all bytes requested or raises.

A dataset in a directory may have millions of files, too many to keep open. So each is stamped when it is listed, and a
file that has another stamp when it is opened is refused: it was replaced, or a directory or link on the way to it was.
"""

from __future__ import annotations

import errno
import io
import os
import shlex
import stat
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, Self

import numpy as np

from legroom.errors import DamagedSource, SourceChanged, UnreadableSource
from legroom.messages import harmless, joined, say
from legroom.system.lazy_and_optional_imports import import_lock, lazy_import
from legroom.units import format_duration, format_size

if TYPE_CHECKING:
    from legroom.formats.fill_output_arrays import Array

_FILES_OF_READER = 2  # open at once: by HDF5 and by us
_FILES_BESIDE = 512  # of the rest of the program
_YOUNG = 5.0  # seconds since a file changed in which another process may still be writing it
_MOST_AT_ONCE = 1 << 30  # macOS refuses reads of 2 GB and more


class Arriving(Protocol):
    """A file whose bytes are still arriving: a remote object that is being downloaded."""

    def wait(self, offset: int, count: int) -> None:
        """Return when these bytes are in the file."""
        ...

    def wait_some(self, offset: int, most: int) -> int:
        """Return when some of these bytes are in the file: how many, one after the other."""
        ...

    def mapped(self) -> memoryview | None:
        """The bytes of a file in a file system in memory, without a copy. Only those that were waited for are there."""
        ...


_arriving: dict[Path, Arriving] = {}


@contextmanager
def arriving(path: Path, by: Arriving) -> Iterator[None]:
    """Let every read of this file wait for its bytes."""
    _arriving[path] = by
    try:
        yield
    finally:
        del _arriving[path]


def wait_for_bytes(path: Path, offset: int, count: int) -> None:
    """Return when these bytes of a file are there. At once for any file that is not being downloaded."""
    if _arriving and (by := _arriving.get(path)) is not None:
        by.wait(offset, count)


def wait_for_some(path: Path, offset: int, most: int) -> int:
    """Return when some of these bytes are there, and how many. All of them for a file that is not being downloaded."""
    if _arriving and (by := _arriving.get(path)) is not None:
        return by.wait_some(offset, most)
    return most


def arriving_bytes(path: Path) -> memoryview | None:
    """The bytes of a file that is being downloaded, without a copy, where that can be. Wait for each before its use."""
    by = _arriving.get(path) if _arriving else None
    return by.mapped() if by is not None else None


def make_room_for_files(count: int) -> None:
    """Raise this process's soft limit of open files, often 1024, where that many readers would not fit below it."""
    try:
        with import_lock:
            import resource
    except ImportError:  # Windows
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = _FILES_OF_READER * count + _FILES_BESIDE
    needed = needed if hard == resource.RLIM_INFINITY else min(needed, hard)
    if soft != resource.RLIM_INFINITY and soft < needed:
        with suppress(OSError, ValueError):  # refused: opening the files reports it
            resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


class SourceFile:
    """One regular file, open for reading. Reading one that is being downloaded waits for the bytes."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._arriving = _arriving.get(path)
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
        """The file descriptor."""
        return self._file.fileno()

    @property
    def alias(self) -> str:
        """A path, for libraries that open files by name, to the file that is open here even if it was replaced."""
        self.wait_for_all()
        return alias(self.fileno()) or os.fspath(self.path)

    @property
    def is_arriving(self) -> bool:
        """Whether it is being downloaded."""
        return self._arriving is not None

    def wait_for_all(self) -> None:
        """Return when the whole file is there."""
        if self._arriving is not None:
            self._arriving.wait(0, self.size)

    def read_at(self, offset: int, count: int) -> bytes:
        """Read exactly ``count`` bytes from ``offset``."""
        self.require(offset, count)
        if self._arriving is not None:
            self._arriving.wait(offset, count)
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
        if self._arriving is not None:
            self._arriving.wait(offset, min(len(view), max(0, self.size - offset)))
        done = 0
        while done < len(view):
            try:
                got = self._read_some(offset + done, view[done : done + _MOST_AT_ONCE])
            except OSError as problem:
                raise unreadable(self.path, problem) from problem
            if got == 0:
                raise truncated(self.path, offset + len(view), offset + done)
            done += got

    def _read_some(self, offset: int, view: memoryview) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(self._file.fileno(), [view], offset)
        with self._lock:  # Windows: all threads share one position
            self._file.seek(offset)
            return self._file.readinto(view) or 0

    @contextmanager
    def as_stream(self) -> Iterator[BinaryIO]:
        """The file as a stream from its start, for libraries that read it themselves. Closing it closes no file.

        A read error is raised as UnreadableSource, whatever the library turns it into.
        """
        stream = _Stream(self)
        try:
            yield io.BufferedReader(stream)
        except Exception:
            if stream.problem is not None:
                raise stream.problem from None
            raise

    def for_arrow(self, arrow: Any) -> Any:
        """The file for pyarrow. One that is being downloaded is read through a stream that waits for its bytes."""
        if self._arriving is not None:
            return arrow.PythonFile(OwningStream(SourceFile(self.path)), "r")
        # Given a name, pyarrow would look for a filesystem by its scheme.
        return arrow.OSFile(self.alias, "rb")

    def require(self, offset: int, count: int) -> None:
        """Refuse a range outside the file, before memory is allocated for it."""
        if offset < 0 or count < 0 or offset + count > self.size:
            raise truncated(self.path, offset + count, self.size)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def absolute(path: str | os.PathLike[str]) -> Path:
    """The absolute path, which stays valid if the working directory changes.

    ``..`` is resolved as the kernel does it: after a symbolic link it is the parent of the link's target.
    """
    text = os.fspath(path) if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    head, dots, tail = text.rpartition("/../")
    if dots:
        text = os.path.join(os.path.realpath(head + "/.."), tail)
    return Path(os.path.realpath(text) if text.endswith("/..") else text)


def alias(descriptor: int) -> str | None:
    """A path to the file behind a descriptor; None if the system has no such path."""
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
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))  # as a file does
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


class OwningStream(_Stream):
    """A stream that closes its file when it is closed or forgotten."""

    def close(self) -> None:
        self._file.close()
        super().close()


def require_regular(path: Path) -> os.stat_result:
    """The file's stat; UnreadableSource if it is not a regular file."""
    try:
        found = os.stat(path)
    except (OSError, ValueError) as problem:
        raise unreadable(path, problem) from problem
    if not stat.S_ISREG(found.st_mode):
        kind = say("a directory") if stat.S_ISDIR(found.st_mode) else say("not a regular file")
        raise UnreadableSource(
            say("cannot read {path}", path=path),
            why=say("it is {kind}", kind=kind),
            fix=(say("pass a data file or the directory of a Zarr store"),),
        )
    return found


def unreadable(path: Path, problem: Exception) -> UnreadableSource:
    """The error for a path that cannot be opened or read."""
    what = say("cannot read {path}", path=path)
    if isinstance(problem, FileNotFoundError):
        if target := _dangling(path):
            return UnreadableSource(
                what,
                why=say("it is a link to {target}, which does not exist", target=target),
                fix=(_fetched_link(path, target),),
            )
        return UnreadableSource(
            what, why=say("no such file"), fix=(say("check the path:\nls {folder}", folder=_word(path.parent)),)
        )
    if isinstance(problem, PermissionError):
        return UnreadableSource(
            what,
            why=say("this user has no read permission"),
            fix=(
                say("check its permissions:\nls -l {path}", path=_word(path)),
                say("ask its owner for read permission"),
            ),
        )
    reason = getattr(problem, "strerror", None) or str(problem)
    if getattr(problem, "errno", None) in (errno.EMFILE, errno.ENFILE):
        fix = say("close unused files, or raise the limit of open files:\nulimit -n 65536")
        return UnreadableSource(what, why=reason, fix=(fix,))
    return UnreadableSource(
        what, why=reason, fix=(say("check the path and its filesystem:\nls -l {path}", path=_word(path)),)
    )


def _word(path: object) -> str:
    """A path as one word of a command."""
    return shlex.quote(str(path))


def _fetched_link(path: Path, target: str) -> str:
    """What to do about a link to a file that a program fetches: the cache of Hugging Face, git-annex."""
    if "/annex/objects/" in target:
        return say("fetch it in the clone:\ngit annex get {path}", path=_word(path))
    parts = path.parts
    at = parts.index("snapshots") if "snapshots" in parts else 0
    kind, *name = parts[at - 1].split("--") if at else ("",)
    if kind not in ("models", "datasets", "spaces") or not name or len(parts) < at + 3:
        return say("restore the file the link points to, or point the link elsewhere")
    repo = "" if kind == "models" else f" --repo-type {kind[:-1]}"
    file = "/".join(parts[at + 2 :])
    return say(
        "the cache of Hugging Face has lost it or is still downloading it; download it:\nhf download {repo} {file}",
        repo=shlex.quote("/".join(name)),
        file=shlex.quote(file) + repo,
    )


def _dangling(path: Path) -> str | None:
    """The target of the first broken link in ``path``, or None if no link is broken."""
    for step in (path, *path.parents):
        try:
            target = os.readlink(step)
        except (OSError, ValueError):
            continue
        if not step.exists():
            return os.path.normpath(step.parent / target)
    return None


def truncated(path: Path, needed: int, size: int) -> DamagedSource:
    """The error for a file that ends before its data."""
    why = say(
        "its data end at byte {needed}, but the file ends at byte {size} ({missing} missing)",
        needed=needed,
        size=size,
        missing=format_size(max(0, needed - size)),
    )
    fix = say("copy or download the file again and compare its size with the original's")
    return _damage(path, say("{path} is truncated", path=path), why, fix)


def changed_while_read(path: object) -> SourceChanged:
    """The error for a file that changes while it is read."""
    return SourceChanged(
        say("{path} changed while it was being read", path=path),
        why=say("its size or timestamps changed after the load began"),
        fix=(say("wait until the file is fully written, then open it again"),),
    )


def damaged(path: Path, why: str) -> DamagedSource:
    """The error for a file that violates its format.

    ``why`` names the rule that it violates: plain English, for those who know the format.
    """
    fix = say("copy or download the file again, or recreate it")
    return _damage(path, say("{path} is damaged", path=path), harmless(why), fix)


def _damage(path: Path, what: str, why: str, fix: str) -> DamagedSource:
    """The error, unless another file is in this one's place: a Git LFS pointer, a part of a download."""
    found = lazy_import("legroom.formats.unsupported_file_types").stands_in(path)
    if found is None:
        return DamagedSource(what, why=why, fix=(fix, *_wait_until_written(path)))
    if found.by_name:
        return DamagedSource(what, why=joined((why, found.why)), fix=found.fix)
    return DamagedSource(say("cannot read {path}", path=path), why=found.why, fix=found.fix)


def _wait_until_written(path: Path) -> tuple[str, ...]:
    """What to do if the file ends too early, or has no end yet, because a process is still writing it."""
    try:
        age = time.time() - os.stat(path).st_mtime
    except (OSError, ValueError):
        return ()
    if not 0 <= age < _YOUNG or path in _arriving:
        return ()
    return (say("or wait until it is written: it changed {age} ago", age=format_duration(age)),)


def invalid_text(what: str, problem: UnicodeDecodeError, *fix: str) -> DamagedSource:
    """The error for a text that is not UTF-8, which is found when it is decoded."""
    return DamagedSource(what, why=str(problem), fix=(say("write it again as UTF-8 text, or as bytes"), *fix))


def wrong_checksum(path: Path, name: str, has: int, needed: int) -> DamagedSource:
    """The error for bytes that do not match the CRC-32 stored in the file."""
    return damaged(
        path,
        say(
            "the checksum of {name!r} is {has:08x}, but the archive stores {needed:08x}",
            name=name, has=has, needed=needed,
        ),
    )  # fmt: skip


_FIELDS = struct.Struct("=QQqqq")  # device, inode, size, times of change
STAMP_BYTES = _FIELDS.size
_ROW = np.dtype([("dev", "u8"), ("ino", "u8"), ("size", "i8"), ("mtime_ns", "i8"), ("ctime_ns", "i8")])
_AT_ONCE = 1 << 14  # stamps compared at once
_FOLDER = os.O_RDONLY | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_CLOEXEC", 0)
_FILE = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)


pack_fields = _FIELDS.pack


def packed_stamp(stats: os.stat_result) -> bytes:
    """The fields that identify a file's content, in 40 bytes."""
    return pack_fields(stats.st_dev, stats.st_ino, stats.st_size, stats.st_mtime_ns, stats.st_ctime_ns)


def unpacked_stamp(stamps: bytes | bytearray, number: int) -> tuple[int, int, int, int, int]:
    """Device, inode, size, and the two times in nanoseconds, of one of many stamps."""
    fields = _FIELDS.unpack_from(stamps, number * STAMP_BYTES)
    return fields[0], fields[1], fields[2], fields[3], fields[4]


def sizes_in(stamps: bytes | bytearray) -> Array:
    """The size of each file."""
    sizes: Array = np.frombuffer(stamps, _ROW)["size"]
    return sizes


def distinct_size(stamps: bytes | bytearray) -> int:
    """The bytes of all files; one that has several names counts once."""
    rows = np.frombuffer(stamps, _ROW)
    _, first = np.unique(rows[["dev", "ino"]], return_index=True)
    return int(rows["size"][first].sum())


def latest_times(stamps: bytes | bytearray) -> tuple[int, int]:
    """The latest modification and the latest change of all files, in nanoseconds."""
    rows = np.frombuffer(stamps, _ROW)
    return int(rows["mtime_ns"].max(initial=0)), int(rows["ctime_ns"].max(initial=0))


def are_among(stamps: bytes | bytearray, others: bytes | bytearray) -> bool:
    """Whether each of these stamps is one of the others."""
    text = np.dtype(("S", STAMP_BYTES))
    wanted, known = np.frombuffer(stamps, text), np.sort(np.frombuffer(others, text))
    for start in range(0, len(wanted), _AT_ONCE):
        some = wanted[start : start + _AT_ONCE]
        if not len(known) or not bool((known[np.searchsorted(known, some) % len(known)] == some).all()):
            return False
    return True


class FolderRoot:
    """A directory, open while its files are read."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.fd = os.open(path, _FOLDER)
        except OSError as problem:
            raise unreadable(path, problem) from problem

    def open_folder(self, name: str) -> int:
        """A descriptor of a directory below it."""
        try:
            return os.open(name or ".", _FOLDER, dir_fd=self.fd)
        except OSError as problem:
            raise self.gone(name, problem) from problem

    def stat(self, name: str) -> os.stat_result:
        """The stat of a file below it, behind symbolic links."""
        try:
            fd = os.open(name, _FILE, dir_fd=self.fd)  # as the files are stamped: some servers answer an open afresh
            try:
                return os.fstat(fd)
            finally:
                os.close(fd)
        except OSError as problem:
            raise unreadable(self.path / name, problem) from problem

    def gone(self, name: str, problem: OSError) -> Exception:
        """The error for a file or directory that was listed and can no longer be opened."""
        if isinstance(problem, (FileNotFoundError, NotADirectoryError)):
            return changed_while_read(self.path / name)
        return unreadable(self.path / name, problem)

    def close(self) -> None:
        os.close(self.fd)


class FolderFile(SourceFile):
    """One file of a directory, opened through the directory's descriptor. It must have the stamp it was listed with."""

    def __init__(self, root: FolderRoot, name: str, stamp: bytes | bytearray) -> None:
        self.path = root.path / name
        self._arriving, self._lock = None, threading.Lock()
        try:
            fd = os.open(name, _FILE, dir_fd=root.fd)
        except OSError as problem:
            raise root.gone(name, problem) from problem
        stats = os.fstat(fd)
        self.size = stats.st_size
        if packed_stamp(stats) != stamp:  # also where a directory is in its place
            os.close(fd)
            raise changed_while_read(self.path)
        self._file = os.fdopen(fd, "rb", buffering=0)
