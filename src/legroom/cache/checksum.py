"""CRC-32 of data files, taken in parts and joined.

Covers: the checksum of a part, of a file, and of two parts one after the other.
Does not cover: identity (identity.py): a CRC finds damage, not forgery.

CRC-32 because it is in the standard library, every other tool can compute it, and parts that several threads
copied can be joined without reading them again. Where isal is installed a core does tens of GB/s of it, so it
hides behind the copy; zlib does about 4.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from functools import cache
from typing import Any, Protocol

from legroom.cache.fileio import read_at

_POLYNOMIAL = 0xEDB88320
_CHUNK = 1 << 20
Part = tuple[int, int]  # (crc, length)


class Crc(Protocol):
    def __call__(self, data: Any, value: int = 0, /) -> int: ...


@cache
def crc32() -> Crc:
    """The fastest CRC-32 there is here."""
    try:
        from isal import isal_zlib
    except ImportError:
        return zlib.crc32
    fast: Crc = isal_zlib.crc32
    return fast


def joined(parts: Iterable[Part]) -> int:
    """The CRC of all parts one after the other."""
    total = 0
    for crc, length in parts:
        total = (_multiply(_shift(length), total) if total else 0) ^ crc
    return total


def of_file(fd: int, offset: int = 0) -> int:
    """The CRC of a file from ``offset`` to its end."""
    crc, total, buffer = crc32(), 0, bytearray(_CHUNK)
    view = memoryview(buffer)
    while got := read_at(fd, view, offset):
        total = crc(view[:got], total)
        offset += got
    return total


def as_text(crc: int) -> str:
    """Eight hexadecimal digits, as the manifest holds them."""
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
