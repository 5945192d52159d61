"""Paths cuda-kernel and cuda-registered: the GPU's cores gather rows from shared memory registered with CUDA.

One kernel per column on the side stream: the CPU only sends row numbers, and rows cross PCIe once.

User arrays are private copy-on-write maps, and registering one would copy all of it. So the file is mapped a second
time, shared and read-only, which takes address space but no memory. Registered pages cannot be swapped out. Changes
that this process made in place in its arrays are not in the file, and the GPU does not see them.

Ownership: a RegisteredFile owns its mapping for as long as the resource cache keeps it. Pages that CUDA fails to
unregister stay mapped, because the GPU may still read them.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_gather_base import (
    RESOURCES,
    CudaGatherer,
    EpochOrder,
    QueuedBatch,
    ResourceUse,
    RowLayout,
)
from legroom.messages import say
from legroom.system.processes_and_threads import MAP_FAILED, last_error, libc

if TYPE_CHECKING:
    import torch

    from legroom.loader.batches.cuda_kernel import ColumnGather, GatherKernel


NDArray = np.ndarray[Any, Any]
KERNEL_PATH, SELECT_PATH = "cuda-kernel", "cuda-registered"


@dataclass(slots=True)
class RegisteredColumns:
    """Columns in registered memory: the address of each one's first row; columns without bytes have none."""

    columns: Mapping[str, NDArray]  # they keep the entry in the cache
    addresses: dict[str, int]
    uses: list[ResourceUse[RegisteredFile]]

    def array(self, name: str) -> NDArray:
        """A column as it is in the registered file, without what this process wrote into its own array."""
        column = self.columns[name]
        start = self.addresses.get(name)
        if start is None:
            return column
        memory: Any = (ctypes.c_char * column.nbytes).from_address(start)
        found: NDArray = np.frombuffer(memory, np.uint8).view(column.dtype).reshape(column.shape)
        return found

    def release(self) -> None:
        """Release the registered files; queued work must not read them any more. A second call does nothing."""
        for use in self.uses:
            use.release()
        self.uses.clear()
        self.addresses.clear()
        self.columns = {}


def register_columns(
    driver: Driver, columns: Mapping[str, NDArray], files: Mapping[str, tuple[Path, int]]
) -> RegisteredColumns:
    """Register the files of these columns; where CUDA refuses, CudaRefused, and nothing stays registered."""
    found = RegisteredColumns(dict(columns), {}, [])
    try:
        for name, column in columns.items():
            if column.nbytes:
                path, offset = files[name]
                use = register_file(driver, Path(path), offset, column)
                found.uses.append(use)
                found.addresses[name] = use.resource.address + offset
    except CudaRefused as refusal:
        found.release()
        raise CudaRefused(say("CUDA did not register the shared copy: {refusal}", refusal=refusal)) from refusal
    except BaseException:
        found.release()
        raise
    return found


class RegisteredGatherer(CudaGatherer):
    """The GPU's cores gather from registered memory: with a kernel of few blocks, else with ``index_select``."""

    def __init__(
        self,
        driver: Driver,
        rows: Mapping[str, RowLayout],
        registered: RegisteredColumns,
        why: str,
        kernel: GatherKernel | None = None,
    ) -> None:
        super().__init__(driver, SELECT_PATH if kernel is None else KERNEL_PATH, why)
        self._rows, self._registered = dict(rows), registered
        self._order = EpochOrder(driver)
        self._sources: dict[str, torch.Tensor] = {}
        self._kernels: dict[str, ColumnGather] = {}
        for name, start in registered.addresses.items():
            kind = rows[name]
            width = kind.width(start)
            seen = driver.window(start, kind.count * kind.nbytes // width, width)
            self._sources[name] = seen.view(kind.count, kind.nbytes // width)
            if kernel is not None:
                self._kernels[name] = kernel.of_column(seen.data_ptr(), kind.nbytes)

    def _start(self, rows: NDArray) -> Callable[[], QueuedBatch]:
        batch = QueuedBatch(self.side, self._rows, len(rows))
        batch.before()
        address = self._order.address(rows) if self._kernels else None
        if address is None:
            with self.side.queueing():
                chosen = self._order.on_device(rows)
                if self._kernels:
                    self._launch(batch, chosen.data_ptr(), len(rows))
                else:
                    self._select(batch, chosen)
        else:
            self._launch(batch, address, len(rows))
        batch.queued()
        return lambda: batch

    def _launch(self, batch: QueuedBatch, chosen: int, count: int) -> None:
        for name, kernel in self._kernels.items():
            kernel(chosen, batch.tensors[name].data_ptr(), count, self.side.stream.cuda_stream)

    def _select(self, batch: QueuedBatch, chosen: torch.Tensor) -> None:
        import torch

        for name, source in self._sources.items():
            part = self._rows[name].as_words(batch.tensors[name], source.dtype)
            torch.index_select(source, 0, chosen, out=part)

    def _release(self) -> None:
        self._order.drop()
        self._sources.clear()
        self._kernels.clear()
        self._registered.release()


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
