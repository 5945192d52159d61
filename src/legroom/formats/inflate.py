"""Inflating deflate streams, as fast as this machine can.

Covers: a whole stream of known size by libdeflate where it is installed, streams in pieces by isal where that is,
else Python's zlib; all let other threads run. Does not cover: any container around the streams.

libdeflate (the package deflate) takes 0.8 of isal's time for photographs and half of it for masks, but wants a stream
at once; isal takes 0.73 of zlib's.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import ModuleType

import numpy as np

from legroom.words import say

_HEAP = 4 << 20
MOST_EXPANSION = 1032  # deflate codes at most 258 bytes in two bits

Bytes = bytes | bytearray | memoryview
Whole = Callable[[Bytes, int], bytes | bytearray]


@cache
def zlib_module() -> ModuleType:
    """isal's zlib where it is installed, else Python's; both have the same functions."""
    try:
        from isal import isal_zlib
    except ImportError:
        import zlib

        return zlib
    module: ModuleType = isal_zlib
    return module


@cache
def _whole() -> tuple[Whole, type[Exception]]:
    """What inflates a stream of at most so many bytes at once, and what it raises."""
    _keep_what_is_freed()
    try:
        import deflate
    except ImportError:
        module = zlib_module()
        return lambda packed, size: module.decompress(packed, bufsize=size), module.error
    return deflate.zlib_decompress, deflate.DeflateError


def _keep_what_is_freed() -> None:
    """Let chunks that come and go use the same memory again.

    glibc gives memory back as soon as twice the largest block that it has ever mapped by itself and seen freed is
    free at its heap's end, and then every page is taken and cleared anew: for chunks of 200 kB that was a fifth of
    a load. A program that has freed an array of some megabytes is beyond that, a young one is not.
    """
    np.empty(_HEAP, np.uint8)


def inflate(packed: Bytes, size: int) -> bytes | bytearray:
    """The whole of a zlib stream that must give exactly ``size`` bytes; ValueError where it does not."""
    if size > len(packed) * MOST_EXPANSION + 64:
        # Before memory is taken for it: a damaged file may promise anything.
        raise ValueError(say("{packed} packed bytes cannot hold {size}", packed=len(packed), size=size))
    unpack, problems = _whole()
    try:
        plain = unpack(packed, max(size, 1))
    except problems as problem:
        raise ValueError(
            say("{packed} packed bytes are not the {size} that were promised", packed=len(packed), size=size)
        ) from problem
    if len(plain) != size:
        raise ValueError(say("{plain} bytes where {size} were promised", plain=len(plain), size=size))
    return plain
