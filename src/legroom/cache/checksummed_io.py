"""Read and write whole ranges of files at an offset, and compute their CRC-32.

CRC-32 is in the standard library, every other tool can compute it, and the checksums of parts that several threads
copied can be combined without reading them again. It detects damage, not forgery. isal computes tens of GB/s per
core, so the cost disappears behind the copy. zlib computes about 4 GB/s.
"""

from __future__ import annotations

import errno
import os
import sys
import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

from legroom.system.libc import last_error, libc


def read_at(fd: int, view: memoryview, offset: int) -> int:
    """Read into ``view`` from ``offset``. Returns the number of bytes, 0 at the end."""
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
    """Write a file's dirty pages and wait for that, without the disk flush of fsync."""
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


MOST_PARTS = 256  # per call: POSIX guarantees 16, Linux allows 1024


def write_parts(fd: int, parts: list[memoryview], offset: int) -> None:
    """Write several buffers one after the other at ``offset``, in one call if the system can."""
    done = os.pwritev(fd, parts, offset) if hasattr(os, "pwritev") and len(parts) <= MOST_PARTS else 0
    for part in parts:
        if done < len(part):  # a short write, or none
            write_all(fd, part[done:], offset + done)
        done = max(0, done - len(part))
        offset += len(part)


_POLYNOMIAL = 0xEDB88320
_CHUNK = 1 << 20
Part = tuple[int, int]  # (crc, length)


class Crc(Protocol):
    def __call__(self, data: Any, value: int = 0, /) -> int: ...


@cache
def crc32() -> Crc:
    """The fastest CRC-32 function installed."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Crc = isal_zlib.crc32
    return fast


def combined(parts: Iterable[Part]) -> int:
    """The CRC of all parts, concatenated."""
    total = 0
    for crc, length in parts:
        total = (_multiply(_shift(length), total) if total else 0) ^ crc
    return total


def file_crc32(fd: int, offset: int = 0) -> int:
    """The CRC of a file from ``offset`` to its end."""
    crc, total, buffer = crc32(), 0, bytearray(_CHUNK)
    view = memoryview(buffer)
    while got := read_at(fd, view, offset):
        total = crc(view[:got], total)
        offset += got
    return total


def hex_digits(crc: int) -> str:
    """Eight hexadecimal digits, as in the manifest."""
    return f"{crc:08x}"


def _multiply(a: int, b: int) -> int:
    """The product of two polynomials modulo the CRC's, bits reflected: the highest bit is x^0."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)
    return product


@cache
def _power(exponent: int) -> int:
    """x to the power of 2^exponent."""
    return 1 << 30 if exponent == 0 else _multiply(_power(exponent - 1), _power(exponent - 1))


@cache
def _shift(length: int) -> int:
    """x^(8·length): what a CRC is multiplied by when ``length`` bytes follow."""
    product, exponent, bits = 1 << 31, 3, length
    while bits:
        if bits & 1:
            product = _multiply(_power(exponent % 32), product)
        bits >>= 1
        exponent += 1
    return product
