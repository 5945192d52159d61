"""Pages spread over the memory of all NUMA nodes.

Covers: interleaving what this thread allocates while a block lasts. Does not cover: where threads run.

Without it every page of an entry lies on the node of the one process that built it, and the trainers on the other
node read it all across the link between them.
"""

from __future__ import annotations

import ctypes
import platform
from collections.abc import Iterator
from contextlib import contextmanager

from legroom.probe.host import Host
from legroom.system.libc import libc

_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}  # get_mempolicy, set_mempolicy
_INTERLEAVE = 3
_BITS = 1024  # nodes a mask has room for: as many as the kernel can be built for


def nodes(host: Host | None = None) -> list[int]:
    """The nodes that have memory; empty where that is not known."""
    return parse((host or Host()).text("/sys/devices/system/node/has_memory") or "")


def parse(text: str) -> list[int]:
    """A list as the kernel writes it: ``0-1,4``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return []
        found.extend(range(int(first), int(last or first) + 1))
    return [node for node in found if node < _BITS]


@contextmanager
def interleaved(chosen: list[int] | None = None) -> Iterator[bool]:
    """Spread this thread's new pages over the nodes; yields whether that is so. One node is left as it is."""
    chosen = nodes() if chosen is None else chosen
    calls = _CALLS.get(platform.machine())
    if len(chosen) < 2 or calls is None:
        yield False
        return
    get, put = calls
    mode, mask = ctypes.c_int(), _mask([])
    if libc().syscall(get, ctypes.byref(mode), mask, _BITS, None, 0) != 0:
        yield False
        return
    done = libc().syscall(put, _INTERLEAVE, _mask(chosen), _BITS + 1) == 0
    try:
        yield done
    finally:
        if done:
            libc().syscall(put, mode.value, mask, _BITS + 1)


def _mask(chosen: list[int]) -> ctypes.Array[ctypes.c_ulong]:
    width = 8 * ctypes.sizeof(ctypes.c_ulong)
    mask = (ctypes.c_ulong * (_BITS // width + 1))()
    for node in chosen:
        mask[node // width] |= 1 << node % width
    return mask
