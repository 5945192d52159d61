"""Write files at an offset, and write them through to the disk where memory is short.

Written pages belong to the page cache of the writer's memory cgroup. Until the disk has them, the kernel cannot reclaim
them. On a busy disk, cgroup v2 does not wait for that: with 134 MB of other memory in a cgroup of 200 MB and a file of
96 MB, the process was OOM-killed with 72 MB under writeback. So where a file does not fit into the free memory, each
megabyte is written back before the next one is written.
"""

from __future__ import annotations

import ctypes
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator

from legroom.system.processes_and_threads import last_error, libc

MOST_PARTS = 256  # per call: POSIX guarantees 16, Linux allows 1024
_PIECE = 1 << 20

WriteParts = Callable[[int, Iterable[memoryview], int], None]


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def write_parts(fd: int, parts: Iterable[memoryview], offset: int) -> None:
    """Write several buffers one after the other at ``offset``, in one call if the system can."""
    parts = list(parts)
    done = os.pwritev(fd, parts, offset) if hasattr(os, "pwritev") and len(parts) <= MOST_PARTS else 0
    for part in parts:
        if done < len(part):  # a short write, or none
            write_all(fd, part[done:], offset + done)
        done = max(0, done - len(part))
        offset += len(part)


def write_through(fd: int, parts: Iterable[memoryview], offset: int) -> None:
    """Write several buffers one after the other at ``offset``; no more than a megabyte of them waits for the disk."""
    pieces = (part[start : start + _PIECE] for part in parts for start in range(0, len(part), _PIECE))
    for group in grouped(pieces, _PIECE):
        length = sum(map(len, group))
        write_parts(fd, group, offset)
        write_back(fd, offset, length)
        offset += length


def grouped(parts: Iterable[memoryview], most: int) -> Iterator[list[memoryview]]:
    """Group the parts to about ``most`` bytes: writers to one file take turns, so fewer writes are better.

    Larger groups would leave the core's cache before they are written.
    """
    group: list[memoryview] = []
    size = 0
    for part in parts:
        if group and (size + len(part) > most or len(group) == MOST_PARTS):
            yield group
            group, size = [], 0
        group.append(part)
        size += len(part)
    if group:
        yield group


def write_back(fd: int, offset: int = 0, length: int = 0) -> None:
    """Write a range's dirty pages (0: to the end) and wait for that, without the disk flush of fsync."""
    if sys.platform == "linux":
        everything = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, WRITE, WAIT_AFTER
        if libc().sync_file_range(fd, ctypes.c_int64(offset), ctypes.c_int64(length), everything) == 0:
            return
        problem = last_error()
        if problem.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise problem
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise


class WrittenThrough:
    """A new file for writing, as pyarrow takes it (``PythonFile``), that is written through to the disk."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        self._size = self._there = 0  # bytes written, and those of them that the disk has
        self.closed = False

    def write(self, data: bytes | memoryview) -> int:
        """Append these bytes."""
        view = memoryview(data).cast("B")
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            write_all(self._fd, piece, self._size)
            self._size += len(piece)
            if self._size - self._there >= _PIECE:  # not after each of many small buffers
                write_back(self._fd, self._there, self._size - self._there)
                self._there = self._size
        return len(view)

    def tell(self) -> int:
        """Bytes written until now."""
        return self._size

    def flush(self) -> None:
        """Nothing: no bytes wait here."""

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if not self.closed:
            self.closed = True
            os.close(self._fd)
