"""The filters that HDF5 applies to chunks; undoes the common ones without HDF5.

Undoes deflate, shuffle and fletcher32 in any order, and honors the mask of filters that a chunk skipped. HDF5 itself
undoes all other filters; hdf5plugin is imported if it may provide one.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.decompress_deflate import Bytes, inflate
from legroom.messages import say

DEFLATE, SHUFFLE, FLETCHER32 = 1, 2, 3
_NAMES = {
    4: "szip", 5: "nbit", 6: "scale-offset", 307: "bzip2", 32000: "lzf", 32001: "blosc", 32004: "lz4",
    32008: "bitshuffle", 32013: "zfp", 32015: "zstd", 32018: "fcidecomp", 32026: "blosc2", 32029: "sperr",
}  # fmt: skip
_ROW = 256  # words whose weighted sum fits into 32 bits


@dataclass(frozen=True, slots=True)
class ChunkFilter:
    """One filter of a dataset, in the order it was applied."""

    code: int
    values: tuple[int, ...]
    name: str


def filters_of(properties: Any) -> tuple[ChunkFilter, ...]:
    """The filters of a dataset's creation properties."""
    found = []
    for index in range(properties.get_nfilters()):
        code, _, values, name = properties.get_filter(index)
        shown = name.split(b"\0")[0].decode("ascii", "replace").strip()
        found.append(ChunkFilter(code, tuple(values), _NAMES.get(code) or shown or "unnamed"))
    return tuple(found)


def memory_in_hdf5(dataset: Any) -> int:
    """Bytes of memory that HDF5 itself needs to read one chunk of a dataset; 0 if it has no chunks.

    Each filter holds its input and its output; the output of deflate is up to twice too large.
    """
    if dataset.chunks is None:
        return 0
    chunk: int = prod(dataset.chunks) * dataset.id.get_type().get_size()
    filters = filters_of(dataset.id.get_create_plist())
    return chunk * (3 if any(one.code == DEFLATE for one in filters) else 2)


def require_filters(filters: tuple[ChunkFilter, ...], name: str, path: Path) -> None:
    """Refuse a dataset whose filters are not available; hdf5plugin is imported only if it may help."""
    from h5py import h5z

    missing = [one for one in filters if not h5z.filter_avail(one.code)]
    if not missing:
        return
    try:
        import hdf5plugin  # noqa: F401  registers its filters
    except ImportError:
        why, fix = say("hdf5plugin is not installed"), "pip install hdf5plugin"
    else:
        missing = [one for one in missing if not h5z.filter_avail(one.code)]
        if not missing:
            return
        why, fix = (
            say("hdf5plugin does not provide it"),
            say("install the HDF5 plugin of this filter, or rewrite the dataset with gzip"),
        )
    raise UnsupportedData(
        say(
            "{name!r} of {path} is compressed with {filter} (filter {code})",
            name=name,
            path=path,
            filter=missing[0].name,
            code=missing[0].code,
        ),
        why=say("the installed HDF5 has no such filter, and {why}", why=why),
        fix=(fix, say("load only what you need: keys=[…]")),
    )


def can_undo(filters: tuple[ChunkFilter, ...]) -> bool:
    """Whether these filters can be undone without HDF5."""
    return all(one.code in (DEFLATE, SHUFFLE, FLETCHER32) for one in filters)


def memory_to_undo(filters: tuple[ChunkFilter, ...], stored: int, size: int, *, convert: bool = False) -> int:
    """Peak bytes of memory to decode a chunk of ``stored`` bytes into ``size`` plain ones.

    Each step holds its input and its output; ``convert`` adds one step.
    """
    steps = sum(one.code in (DEFLATE, SHUFFLE) for one in filters) + convert
    steps += size % 2 and any(one.code == FLETCHER32 for one in filters)  # an odd length is copied for its checksum
    if steps == 0:
        return stored
    return stored + size if steps == 1 else max(stored + size, 2 * size)


def undo(filters: tuple[ChunkFilter, ...], stored: bytes, mask: int, size: int) -> np.ndarray[Any, Any]:
    """Decode one chunk to exactly ``size`` plain bytes; ValueError if that fails.

    Callers keep no reference to ``stored``: it is freed as soon as the first filter is undone.
    """
    applied = [one for bit, one in enumerate(filters) if not mask >> bit & 1]
    sizes = _sizes_before(applied, size)
    data: Bytes = stored
    del stored
    for one in reversed(applied):
        before = sizes.pop()
        if one.code == DEFLATE:
            data = inflate(data, before)
        elif one.code == FLETCHER32:
            data = _verified(data)
        else:
            data = _unshuffled(data, one.values[0] if one.values else 1)
    if len(data) != size:
        raise ValueError(say("the chunk has {length} bytes instead of {size}", length=len(data), size=size))
    return np.frombuffer(data, np.uint8)


def _sizes_before(applied: list[ChunkFilter], size: int) -> list[int]:
    """The input size of each filter: only fletcher32 changes the length before deflate."""
    sizes = []
    for one in applied:
        sizes.append(size)
        size += 4 if one.code == FLETCHER32 else 0
    return sizes


def _unshuffled(data: Bytes, width: int) -> memoryview:
    """Undo shuffle, which groups bytes by significance; the remainder was never moved."""
    count = len(data) // width if width > 1 else 0
    if count <= 1:
        return memoryview(data)
    whole = count * width
    grouped = np.frombuffer(data, np.uint8, whole).reshape(width, count)
    plain = np.empty(len(data), np.uint8)
    target = plain[:whole].reshape(count, width)
    for byte in range(width):  # a column at a time: two to six times as fast as one transposed copy
        target[:, byte] = grouped[byte]
    plain[whole:] = np.frombuffer(data, np.uint8)[whole:]
    return plain.data


def _verified(data: Bytes) -> memoryview:
    """The data without their checksum, after verifying it."""
    if len(data) < 4:
        raise ValueError(say("a chunk of {length} bytes is too short for its checksum", length=len(data)))
    body, tail = memoryview(data)[:-4], bytes(data[-4:])
    has = fletcher32(body)
    # HDF5 up to 1.6.2 swapped the bytes of both halves on little-endian machines.
    swapped = (has & 0xFF00FF) << 8 | (has >> 8) & 0xFF00FF
    if int.from_bytes(tail, "little") not in (has, swapped):
        raise ValueError(
            say("the chunk's checksum is {has:08x}, but the file stores {hex}", has=has, hex=tail[::-1].hex())
        )
    return body


def fletcher32(data: memoryview) -> int:
    """HDF5's Fletcher-32 over big-endian 16-bit words; an odd last byte is the high byte of a word.

    Modulo 65535, swapping a word's bytes multiplies it by 256. So the sums are taken over little-endian words, which is
    faster, and swapped at the end.
    """
    even = len(data) & ~1
    words = np.frombuffer(data[:even], "<u2")
    if even != len(data):
        words = np.append(words, np.array([data[-1]], "<u2"))
    whole = len(words) // _ROW * _ROW
    rows, tail = words[:whole].reshape(-1, _ROW), words[whole:].astype(np.uint64)
    sums = rows.sum(axis=1, dtype=np.uint64)
    # A word counts once for itself and once for every word after it.
    within = np.einsum("ij,j->i", rows, np.arange(_ROW, 0, -1, dtype=np.uint32), dtype=np.uint32)
    after = (len(words) - _ROW * np.arange(1, len(rows) + 1, dtype=np.uint64)) % 65535
    low = int(sums.sum()) + int(tail.sum())
    high = int(within.sum(dtype=np.uint64)) + int((sums * after).sum())
    high += int(np.dot(tail, np.arange(len(tail), 0, -1, dtype=np.uint64)))
    if low == 0:
        return 0
    return _swapped(high) << 16 | _swapped(low)


def _swapped(total: int) -> int:
    """Swap a sum modulo 65535 with end-around carry: a sum that is not zero never becomes zero."""
    return (256 * total - 1) % 65535 + 1
