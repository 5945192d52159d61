"""The files of a directory, opened by name through its descriptor and compared with what was listed.

A dataset in a directory may have millions of files, too many to keep open. So each is stamped when it is listed, and a
file that has another stamp when it is opened is refused: it was replaced, or a directory or link on the way to it was.
"""

from __future__ import annotations

import os
import struct
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from legroom.formats.file_reads_and_errors import SourceFile, changed_while_read, unreadable
from legroom.formats.fill_arrays import Array

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

    def __init__(self, root: FolderRoot, name: str, stamp: Sequence[int]) -> None:
        self.path = root.path / name
        self._arriving, self._lock = None, threading.Lock()
        try:
            fd = os.open(name, _FILE, dir_fd=root.fd)
        except OSError as problem:
            raise root.gone(name, problem) from problem
        self._file = os.fdopen(fd, "rb", buffering=0)
        stats = os.fstat(fd)
        self.size = stats.st_size
        if packed_stamp(stats) != pack_fields(*stamp):
            self._file.close()
            raise changed_while_read(self.path)
