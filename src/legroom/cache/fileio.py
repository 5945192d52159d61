"""Reading and writing at an offset, whole.

Covers: what the system calls leave to the caller: short writes, and systems without preadv (macOS).
Does not cover: sources (formats has its own reading, with its own errors).
"""

from __future__ import annotations

import errno
import os
import sys

from legroom.system.libc import last_error, libc


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read into ``view`` from ``offset``; how many bytes came, 0 at the end."""
    if hasattr(os, "preadv"):
        return os.preadv(fd, [view], offset)
    data = os.pread(fd, len(view), offset)
    view[: len(data)] = data
    return len(data)


def write_all(fd: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    view = memoryview(data)
    while len(view):
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


def write_back(fd: int) -> None:
    """Have a file's dirty pages written, and wait for that; without the flush of the disk that fsync asks for."""
    if sys.platform == "linux":
        everything = 1 | 2 | 4  # SYNC_FILE_RANGE_WAIT_BEFORE, WRITE, WAIT_AFTER
        if libc().sync_file_range(fd, 0, 0, everything) == 0:
            return
        problem = last_error()
        if problem.errno in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
            raise problem
    try:
        os.fsync(fd)
    except OSError as problem:
        if problem.errno not in (errno.EINVAL, errno.EROFS, errno.ENOTSUP):
            raise


MOST_PARTS = 256  # of one call; systems promise 16 and have 1024


def write_parts(fd: int, parts: list[memoryview], offset: int) -> None:
    """Write what lies in several places as one run at ``offset``, in one call where the system has it."""
    done = os.pwritev(fd, parts, offset) if hasattr(os, "pwritev") and len(parts) <= MOST_PARTS else 0
    for part in parts:
        if done < len(part):  # a short write, or none
            write_all(fd, part[done:], offset + done)
        done = max(0, done - len(part))
        offset += len(part)
