"""Decompress deflate streams with the fastest library installed; all of them release the GIL.

Whole streams of known size use libdeflate (package ``deflate``) if installed. Streams in pieces use isal, or else
Python's zlib. libdeflate takes 0.8 of isal's time for photographs and half of it for masks, but needs the whole stream.
isal takes 0.73 of zlib's time.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial
from types import ModuleType

import numpy as np

from legroom.system.lazy_and_optional_imports import import_lock

_HEAP = 4 << 20
_PIECE = 1 << 20
MOST_EXPANSION = 1032  # deflate codes at most 258 bytes in two bits

Bytes = bytes | bytearray | memoryview
Whole = Callable[[Bytes, int], bytes | bytearray]


@cache
def zlib_module() -> ModuleType:
    """isal's zlib if it is installed, or else Python's; both have the same functions."""
    try:
        from isal import isal_zlib
    except ImportError:
        with import_lock:
            import zlib

        return zlib
    module: ModuleType = isal_zlib
    return module


@cache
def _whole() -> tuple[Whole, type[Exception]]:
    """The function that inflates a whole stream, and the exception it raises."""
    _keep_freed_memory()
    try:
        import deflate
    except ImportError:
        module = zlib_module()
        return partial(_inflate_in_pieces, module), module.error
    return deflate.zlib_decompress, deflate.DeflateError


def _inflate_in_pieces(module: ModuleType, packed: Bytes, size: int) -> bytearray:
    """Decompress with zlib or isal. In one call, zlib would hold its output twice, when it joins its blocks."""
    stream, source = module.decompressobj(), memoryview(packed)
    plain, end = bytearray(size), 0
    for start in range(0, len(source), _PIECE):
        rest, full = source[start : start + _PIECE], False
        while (rest or full) and not stream.eof:
            piece = stream.decompress(rest, _PIECE)
            if end + len(piece) > size:
                raise ValueError(f"the {len(packed)} compressed bytes hold more than the expected {size}")
            plain[end : end + len(piece)] = piece
            end += len(piece)
            rest, full = stream.unconsumed_tail, len(piece) == _PIECE
    if not stream.eof:
        raise ValueError(f"the {len(packed)} compressed bytes end before their data do")
    del plain[end:]
    return plain


def _keep_freed_memory() -> None:
    """Make glibc reuse the memory of freed chunks.

    glibc returns the free end of its heap to the system when it exceeds twice the largest block ever mapped and freed.
    Then every page is faulted in and cleared again: a fifth of the load time for chunks of 200 kB. Freeing one array of
    some megabytes raises that threshold.
    """
    np.empty(_HEAP, np.uint8)


def inflate(packed: Bytes, size: int) -> bytes | bytearray:
    """Decompress a whole zlib stream to exactly ``size`` bytes; ValueError if that fails."""
    if size > len(packed) * MOST_EXPANSION + 64:
        # Checked before memory is allocated: a damaged file may claim any size.
        raise ValueError(f"{len(packed)} compressed bytes cannot expand to {size}")
    unpack, problems = _whole()
    try:
        plain = unpack(packed, max(size, 1))
    except problems as problem:
        raise ValueError(f"cannot decompress {len(packed)} bytes to the expected {size}") from problem
    if len(plain) != size:
        raise ValueError(f"decompressed to {len(plain)} bytes instead of {size}")
    return plain
