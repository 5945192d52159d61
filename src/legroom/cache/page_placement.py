"""Huge pages and NUMA interleaving for files in shared memory.

A tmpfs uses 4 kB pages unless mounted otherwise, and the kernel clears, counts and maps each one. MADV_COLLAPSE (Linux
6.1) makes a huge page of a range that has at least one page, whatever the mount options are. Writing to such a file
takes half the time, and reading it for the first time takes no longer than reading it again.

The kernel may have to move other memory, or a hypervisor may have to find the memory first. So the cost is measured:
once a few megabytes have taken twice as long as small pages would, or are refused, the build uses small pages.

Without interleaving every page of an entry lies on the NUMA node of the process that built it, and training runs on
the other node read all of it across the link.
"""

from __future__ import annotations

import ctypes
import os
import platform
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from legroom.cache.mapped_files import HUGE_PAGE, MappedFile
from legroom.probe.host import Host
from legroom.system.libc import libc

_COLLAPSE = 25
_PIECE = 2 * HUGE_PAGE  # allocated between two time measurements
_DEAR = 0.8e-9  # seconds per byte: twice what small pages take
_SETTINGS = "/sys/kernel/mm/transparent_hugepage/"


class HugePages:
    """The huge pages of one build, used as long as they are fast enough."""

    def __init__(self) -> None:
        self._worth_it = hugepages_enabled(os.environ) and hugepages_supported()

    def take(self, fd: int, offset: int, length: int) -> bool:
        """Allocate a range of a file in memory as huge pages, except for the tail. False if small pages are needed."""
        end = offset + length - length % HUGE_PAGE
        if offset % HUGE_PAGE or end == offset:
            return False
        return all(self._take(fd, place, min(_PIECE, end - place)) for place in range(offset, end, _PIECE))

    def _take(self, fd: int, offset: int, length: int) -> bool:
        if not self._worth_it:
            return False
        worked, begun = time.thread_time(), time.monotonic()
        for place in range(offset, offset + length, HUGE_PAGE):
            # MADV_COLLAPSE needs one page in the range. It also decides the NUMA node of the huge page.
            os.pwrite(fd, b"\0", place)
        made = _collapse(fd, offset, length)
        # CPU time excludes other processes on this core. Wall time includes waiting for memory to be moved.
        cost = max(time.thread_time() - worked, (time.monotonic() - begun) / 8)
        self._worth_it = made and cost <= _DEAR * length
        return made


def _collapse(fd: int, offset: int, length: int) -> bool:
    try:
        mapped = MappedFile(fd, length, offset=offset)
    except OSError:  # no addresses left
        return False
    return bool(libc().madvise(mapped.address, mapped.length, _COLLAPSE) == 0)


def hugepages_enabled(env: Mapping[str, str]) -> bool:
    """Whether ``LEGROOM_LARGE_PAGES`` allows huge pages: yes, unless it is 0."""
    return env.get("LEGROOM_LARGE_PAGES", "").strip().lower() not in ("0", "no", "false", "off")


def hugepages_supported(host: Host | None = None) -> bool:
    """Whether this kernel has 2 MB pages and they are not turned off."""
    host = host or Host()
    size = (host.text(_SETTINGS + "hpage_pmd_size") or "").strip()
    return size == str(HUGE_PAGE) and "[never]" not in (host.text(_SETTINGS + "enabled") or "")


_CALLS = {"x86_64": (239, 238), "aarch64": (236, 237)}  # get_mempolicy, set_mempolicy
_INTERLEAVE = 3
_BITS = 1024  # bits in a node mask: the kernel's maximum


def numa_nodes(host: Host | None = None) -> list[int]:
    """The NUMA nodes that have memory. Empty if unknown."""
    return parse_node_list((host or Host()).text("/sys/devices/system/node/has_memory") or "")


def parse_node_list(text: str) -> list[int]:
    """Parse the kernel's list format: ``0-1,4``."""
    found: list[int] = []
    for part in text.strip().split(","):
        first, _, last = part.partition("-")
        if not first.isdecimal() or (last and not last.isdecimal()):
            return []
        found.extend(range(int(first), int(last or first) + 1))
    return [node for node in found if node < _BITS]


@contextmanager
def interleaved(chosen: list[int] | None = None) -> Iterator[bool]:
    """Interleave this thread's new pages over the nodes. Yields whether it does. A single node is left as it is."""
    chosen = numa_nodes() if chosen is None else chosen
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
