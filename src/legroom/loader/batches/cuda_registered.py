"""Path cuda-registered: the GPU gathers rows itself from shared memory that is registered with CUDA.

One ``index_select`` per column on the side stream: the CPU only sends row numbers, and rows cross PCIe once.

User arrays are private copy-on-write maps, and registering one would copy all of it. So the file is mapped a second
time, shared and read-only, which takes address space but no memory. Registered pages cannot be swapped out. Changes
that this process made in place in its arrays are not in the file, and the GPU does not see them.

Ownership: a RegisteredFile owns its mapping for as long as the resource cache keeps it. Pages that CUDA fails to
unregister stay mapped, because the GPU may still read them.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.loader.batches.cuda_driver import CudaRefused, Driver
from legroom.loader.batches.cuda_gather import RESOURCES, CudaGatherer, QueuedBatch, ResourceUse, RowLayout
from legroom.system.libc import MAP_FAILED, last_error, libc
from legroom.words import say

if TYPE_CHECKING:
    import torch


NDArray = np.ndarray[Any, Any]


class RegisteredGatherer(CudaGatherer):
    """Gathers from registered memory: ``sources`` are rows of integers, None where a row has no bytes."""

    def __init__(
        self,
        driver: Driver,
        rows: Mapping[str, RowLayout],
        sources: Mapping[str, torch.Tensor | None],
        uses: Sequence[ResourceUse[Any]],
        columns: Mapping[str, NDArray],
        *,
        path: str,
        why: str,
    ) -> None:
        super().__init__(driver, path, why)
        self._rows, self._sources, self._uses = dict(rows), dict(sources), list(uses)
        self._columns = dict(columns)  # they keep the entry in the cache

    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        import torch

        driver = self.side.driver
        self.side.limit_run_ahead()
        parts: dict[str, torch.Tensor] = {}
        with self.side.queueing():
            chosen = driver.row_numbers(rows)
            for name, source in self._sources.items():
                kind = self._rows[name]
                if source is None:
                    parts[name] = kind.empty(len(rows), driver.device)
                else:
                    parts[name] = kind.restore(torch.index_select(source, 0, chosen))
        batch = self.side.queued(parts)
        return lambda: batch

    def _release(self) -> None:
        self._sources.clear()
        for use in self._uses:
            use.release()
        self._uses.clear()
        self._columns.clear()


def open_registered(
    driver: Driver,
    columns: Mapping[str, NDArray],
    rows: Mapping[str, RowLayout],
    files: Mapping[str, tuple[Path, int]],
) -> RegisteredGatherer:
    """A gatherer on registered memory; where CUDA refuses, CudaRefused, and nothing stays registered."""
    uses: list[ResourceUse[Any]] = []
    sources: dict[str, torch.Tensor | None] = {}
    try:
        for name, column in columns.items():
            kind = rows[name]
            if column.nbytes == 0:
                sources[name] = None
                continue
            path, offset = files[name]
            use = register_file(driver, Path(path), offset, column)
            uses.append(use)
            start = use.resource.address + offset
            width = kind.width(start)
            seen = driver.window(start, column.nbytes // width, width)
            sources[name] = seen.view(kind.count, kind.nbytes // width)
    except BaseException:
        sources.clear()
        for use in uses:
            use.release()
        raise
    why = say("the shared copy is registered with CUDA; the GPU gathers from it")
    return RegisteredGatherer(driver, rows, sources, uses, columns, path="cuda-registered", why=why)


@dataclass(frozen=True, slots=True)
class RegisteredFile:
    """A whole file, mapped and registered."""

    address: int
    length: int


def register_file(driver: Driver, path: Path, offset: int, array: NDArray) -> ResourceUse[RegisteredFile]:
    """The registered map of the file that holds ``array`` at ``offset``; CudaRefused where that fails."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as problem:
        raise CudaRefused(say("{path}: {words}", path=path, words=problem.strerror)) from problem
    try:
        stats = os.fstat(fd)
        if not stat.S_ISREG(stats.st_mode) or stats.st_uid != os.geteuid():
            raise CudaRefused(say("{path} is not a regular file of this user", path=path))
        if stats.st_size < offset + array.nbytes:
            raise CudaRefused(say("{path} is shorter than its array", path=path))
        # The inode exists while the file is mapped, so its number cannot name a later file.
        key = ("registered", str(driver.device), stats.st_dev, stats.st_ino)
        make: Callable[[], RegisteredFile] = partial(_map_and_register, driver, fd, stats.st_size)
        return RESOURCES.use(key, array, make, partial(_unregister, driver))
    finally:
        os.close(fd)


def _map_and_register(driver: Driver, fd: int, size: int) -> RegisteredFile:
    length = -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
    address = libc().mmap(None, length, mmap.PROT_READ, mmap.MAP_SHARED, fd, 0)
    if address == MAP_FAILED:
        raise CudaRefused(say("mmap: {words}", words=last_error().strerror))
    try:
        driver.register(address, length)
    except BaseException:
        libc().munmap(address, length)
        raise
    return RegisteredFile(address, length)


def _unregister(driver: Driver, region: RegisteredFile) -> None:
    try:
        driver.unregister(region.address)
    except (CudaRefused, RuntimeError):
        return  # still registered, so still mapped
    libc().munmap(region.address, region.length)
