"""The log of a producer: what it and its workers print. A dataset may print for every sample: only its end is kept."""

from __future__ import annotations

import os

LOG = ".log"
_MOST, _KEPT = 1 << 20, 64 << 10  # bytes: the log is in the store, which may be in memory


def open_empty(folder: int, name: str) -> int:
    """A descriptor of an empty log in that folder."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    return os.open(name, flags, 0o600, dir_fd=folder)


def shorten(folder: int, name: str) -> None:
    """Keep only the end of a log that is too long; the producer does so every now and then."""
    try:
        fd = os.open(name, os.O_RDWR | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, dir_fd=folder)
    except OSError:
        return
    try:
        size = os.fstat(fd).st_size
        if size > _MOST:
            end = os.pread(fd, _KEPT, size - _KEPT)
            os.ftruncate(fd, 0)
            os.write(fd, end)
    except OSError:
        pass
    finally:
        os.close(fd)
