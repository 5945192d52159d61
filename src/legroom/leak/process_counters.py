"""Memory counters of this process, cheap enough for every few steps: what it uses, and what malloc has given out.

Bytes that malloc has given out do not include fragmentation, which only RSS shows. They are unknown (None) where
another malloc than glibc's is loaded, or one older than 2.33.
"""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

_OTHER_MALLOCS = ("jemalloc", "tcmalloc", "mimalloc", "libhoard")
_WANTED = {b"RssAnon": "anonymous", b"RssShmem": "shmem", b"RssFile": "file", b"VmSwap": "swap", b"VmData": "data"}


@dataclass(frozen=True, slots=True)
class Counters:
    """Bytes, if nothing else is written; None is unknown."""

    anonymous: int | None = None  # RSS without files and shared memory
    shmem: int | None = None
    file: int | None = None
    swap: int | None = None
    data: int | None = None  # private writable address space, touched or not
    malloc: int | None = None  # given out by malloc, mapped chunks included
    malloc_system: int | None = None  # taken from the kernel by malloc
    blocks: int = 0  # small objects of Python
    gpus: tuple[int, ...] = ()  # allocated by torch on each GPU
    collects: bool = True  # Python's garbage collection is on
    dev_shm: int | None = None  # used of /dev/shm, by all processes


_MALLINFO = (
    "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost",
)  # fmt: skip


class _Mallinfo(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in _MALLINFO]


@cache
def _mallinfo2() -> Any:
    """glibc's function, or None where another malloc may be in use."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            if any(name in line for line in maps for name in _OTHER_MALLOCS):
                return None
        function = ctypes.CDLL(None).mallinfo2
    except (OSError, AttributeError):
        return None
    function.restype = _Mallinfo
    return function


def read_counters() -> Counters:
    """The counters of this process now; about 0.1 ms."""
    found: dict[str, int] = {}
    try:
        with open("/proc/self/status", "rb") as status:
            for line in status:
                name, _, rest = line.partition(b":")
                if name in _WANTED:
                    found[_WANTED[name]] = int(rest.split()[0]) * 1024
    except (OSError, ValueError, IndexError):
        pass
    ask = _mallinfo2()
    info = None if ask is None else ask()
    return Counters(
        **found,
        malloc=None if info is None else info.uordblks + info.hblkhd,
        malloc_system=None if info is None else info.arena + info.hblkhd,
        blocks=sys.getallocatedblocks(),
        gpus=_gpu_bytes(),
        collects=gc.isenabled(),
        dev_shm=_dev_shm(),
    )


def _dev_shm() -> int | None:
    try:
        space = os.statvfs("/dev/shm")
    except OSError:
        return None
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def _gpu_bytes() -> tuple[int, ...]:
    """What torch has allocated on each GPU; empty before CUDA was started."""
    return tuple(_of_each_gpu(lambda cuda, number: cuda.memory_allocated(number)))


def _of_each_gpu(read: Callable[[Any, int], int]) -> list[int]:
    torch: Any = sys.modules.get("torch")
    try:
        if torch is None or not torch.cuda.is_initialized():
            return []
        return [read(torch.cuda, number) for number in range(torch.cuda.device_count())]
    except Exception:  # torch is being imported, or the driver is gone
        return []


def process_start() -> float | None:
    """When this process started, in clock ticks since the boot; with the pid it names the process."""
    try:
        with open(f"/proc/{os.getpid()}/stat", encoding="utf-8", errors="replace") as stat:
            return float(stat.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return None


def free_gpus() -> dict[str, int]:
    """Free bytes of each GPU that this process uses; empty without CUDA."""
    free = _of_each_gpu(lambda cuda, number: cuda.mem_get_info(number)[0])
    return {f"gpu{number}": count for number, count in enumerate(free)}
