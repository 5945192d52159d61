"""Files of shared memory, registered with CUDA so that the GPU reads them itself.

Covers: mapping a file once more for the GPU, registering it, undoing both. Does not cover: gathering (cuda/device.py).

The arrays people hold lie on private copy-on-write maps; registering one of those copies it all. So the file is mapped
a second time, shared and read-only, which costs addresses and no memory: however many processes do it, there is one
copy. Its pages cannot be swapped out while they are registered. What this process has changed in place in its own
arrays is not in the file, and not seen by the GPU.

Ownership: a Region owns its addresses. It is registered and then mapped for as long as cuda/keep.py keeps it. Pages
that CUDA would not unregister stay mapped: a GPU that still reads must find them.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from legroom.loader.cuda.driver import Driver, Refused
from legroom.loader.cuda.keep import KEEP, Use
from legroom.system.libc import MAP_FAILED, last_error, libc
from legroom.words import say

NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class Region:
    """A registered map of a whole file."""

    address: int
    length: int


def registered(driver: Driver, path: Path, offset: int, array: NDArray) -> Use[Region]:
    """The registered map of the file in which ``array`` lies at ``offset``; Refused where that cannot be."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        raise Refused(say("{path}: {words}", path=path, words=problem.strerror)) from problem
    try:
        stats = os.fstat(fd)
        if not stat.S_ISREG(stats.st_mode) or stats.st_uid != os.geteuid():
            raise Refused(say("{path} is no file of this user", path=path))
        if stats.st_size < offset + array.nbytes:
            raise Refused(say("{path} is shorter than its array", path=path))
        # The file cannot go while it is mapped, so its number means this file and no later one.
        key = ("registered", str(driver.device), stats.st_dev, stats.st_ino)
        make: Callable[[], Region] = partial(_map_and_register, driver, fd, stats.st_size)
        return KEEP.use(key, array, make, partial(_undo, driver))
    finally:
        os.close(fd)


def _map_and_register(driver: Driver, fd: int, size: int) -> Region:
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    address = libc().mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        raise Refused(say("mmap: {words}", words=last_error().strerror))
    try:
        driver.register(address, length)
    except BaseException:
        libc().munmap(address, length)
        raise
    return Region(address, length)


def _undo(driver: Driver, region: Region) -> None:
    try:
        driver.unregister(region.address)
    except (Refused, RuntimeError):
        return  # still registered, so still mapped
    libc().munmap(region.address, region.length)
