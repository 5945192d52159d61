"""Path cuda-resident: the arrays are kept in GPU memory, one copy for all processes, and batches are gathered there.

There is no transfer to overlap, so everything runs on the consumer's current stream. A gather takes hundredths of a
millisecond, and sending row numbers would take as long again, so the order of an epoch is sent whole. The consumer may
use several streams: the device is synchronized before anything is freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import NoRoom
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.cuda_calls_for_gather import Driver
from legroom.loader.batches.cuda_gather_base import RESOURCES, EpochOrder, OwnedHere, ResourceUse, RowLayout
from legroom.loader.batches.cuda_kernel import IN_GPU_MEMORY, ColumnGather
from legroom.loader.batches.cuda_upload import Upload, upload
from legroom.loader.shared_gpu_memory import SharedCopy, share
from legroom.messages import say
from legroom.records.cache_entry import Entry
from legroom.units import format_size

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
_COMPILE_AT = 8  # batches: compiling takes 20 ms, ten times as long as attaching to a shared copy
_LEAST_LEFT = 1 << 30
_ROUNDING = 2 << 20  # that torch's allocator may add to a large request


class ResidentGatherer(OwnedHere):
    """Gathers from arrays in GPU memory, kept as rows of integers; a use is None where a row has no bytes."""

    path = "cuda-resident"
    ahead = 1

    def __init__(
        self,
        driver: Driver,
        rows: Mapping[str, RowLayout],
        uses: Mapping[str, ResourceUse[ResidentColumn] | None],
        columns: Mapping[str, NDArray],
    ) -> None:
        self._driver, self._rows, self._uses = driver, dict(rows), dict(uses)
        self._columns = dict(columns)  # they keep the entry in the cache
        self._order = EpochOrder(driver, several_streams=True)
        self._kernels: dict[str, ColumnGather] | None = None
        self._gathered = 0
        self._why: str | None = None
        super().__init__()

    @property
    def why(self) -> str:
        """Made when it is read: words take a twentieth of the time of attaching."""
        if self._why is None:
            self._why = _why([use.resource for use in self._uses.values() if use is not None])
        return self._why

    def gather(self, rows: NDArray) -> dict[str, torch.Tensor]:
        """The batch of these rows, gathered on the current stream."""
        import torch

        self.require_usable()
        self._gathered += 1
        if self._gathered == _COMPILE_AT:
            self._kernels = _kernels(self._driver, self._rows, self._uses)
        parts = {name: kind.empty(len(rows), self._driver.device) for name, kind in self._rows.items()}
        address = self._order.address(rows) if self._kernels is not None else None
        if address is not None:
            self._launch(parts, address, len(rows))
            return parts
        with torch.inference_mode(False):  # the order outlives this batch
            chosen = self._order.on_device(rows)
        if self._kernels is not None:
            self._launch(parts, chosen.data_ptr(), len(rows))
            return parts
        for name, use in self._uses.items():
            if use is not None:
                words = use.resource.words
                torch.index_select(words, 0, chosen, out=self._rows[name].as_words(parts[name], words.dtype))
        return parts

    def _launch(self, parts: Mapping[str, torch.Tensor], chosen: int, count: int) -> None:
        stream = self._driver.current().cuda_stream
        for name, kernel in (self._kernels or {}).items():
            kernel(chosen, parts[name].data_ptr(), count, stream)

    def begin(self, rows: NDArray) -> None:
        """Nothing: the GPU would only do the same work earlier."""

    def _close(self) -> None:
        self._why = self.why  # of what is released now
        self._driver.synchronize()
        self._order.drop()
        for use in self._uses.values():
            if use is not None:
                use.release()
        self._uses.clear()
        self._columns.clear()


def _kernels(
    driver: Driver, rows: Mapping[str, RowLayout], uses: Mapping[str, ResourceUse[ResidentColumn] | None]
) -> dict[str, ColumnGather] | None:
    """The gather kernel of each column; None where it cannot be compiled, and torch's index_select is used."""
    try:
        kernel = driver.gather_kernel()
        return {
            name: kernel.of_column(use.resource.words.data_ptr(), rows[name].nbytes, IN_GPU_MEMORY)
            for name, use in uses.items()
            if use is not None
        }
    except CudaRefused:
        return None


@dataclass(slots=True)
class ResidentColumn:
    """A column in GPU memory as rows of integers: in memory that processes share, or in this process's own."""

    words: torch.Tensor
    shared: SharedCopy | None
    why_own: str | None  # why it is not shared


def open_resident(
    driver: Driver, columns: Mapping[str, NDArray], rows: Mapping[str, RowLayout], entry: Entry
) -> ResidentGatherer:
    """A gatherer on copies in GPU memory; NoRoom where they would not leave enough free."""
    keys = {
        name: ("resident", str(driver.device), column.ctypes.data, column.nbytes) for name, column in columns.items()
    }
    uses: dict[str, ResourceUse[ResidentColumn] | None] = {}
    try:
        for name, column in columns.items():
            if column.nbytes == 0:
                uses[name] = None
                continue
            rest = sum(columns[other].nbytes for other, key in keys.items() if key not in RESOURCES)
            make: Callable[[], ResidentColumn] = partial(_copy, driver, column, rows[name], rest, entry, name)
            uses[name] = RESOURCES.use(keys[name], column, make, partial(_drop, driver))
    except BaseException:
        for use in uses.values():
            if use is not None:
                use.release()
        raise
    return ResidentGatherer(driver, rows, uses, columns)


def _why(columns: list[ResidentColumn]) -> str:
    size = format_size(sum(column.words.nbytes for column in columns))
    own = next((column.why_own for column in columns if column.why_own is not None), None)
    if own is not None:
        return say("resident=True: {size} in GPU memory, this process's own copy ({why})", size=size, why=own)
    if any(column.shared is not None and column.shared.made_here for column in columns):
        return say("resident=True: {size} in GPU memory, copied here for all processes", size=size)
    return say("resident=True: {size} in GPU memory, shared with other processes", size=size)


def _copy(driver: Driver, column: NDArray, kind: RowLayout, rest: int, entry: Entry, name: str) -> ResidentColumn:
    """A column in GPU memory, if all columns still to be copied (``rest`` bytes) fit."""
    contiguous = column if column.flags.c_contiguous else np.ascontiguousarray(column)
    words = kind.words(contiguous)
    width = words.itemsize

    def fill(address: int) -> None:
        upload(driver, [Upload(contiguous, driver.at(address, words.size, width))], contiguous.nbytes)

    try:
        if entry.key is None or entry.store is None:
            raise CudaRefused(say("the data are not in the shared cache ({backing})", backing=entry.backing))
        shared = share(
            driver.api(), Path(entry.store), f"{entry.key} {name} {kind.nbytes}x{kind.count}", column.nbytes, fill,
            check_room=partial(_check_room, driver, rest), title=_title(entry, name),
        )  # fmt: skip
        try:
            return ResidentColumn(driver.at(shared.address, words.size, width).view(words.shape), shared, None)
        except BaseException:
            shared.close()
            raise
    except CudaRefused as refusal:
        why = str(refusal)
    _check_room(driver, rest)
    try:
        own = driver.empty(words.size, width)
        upload(driver, [Upload(contiguous, own)], contiguous.nbytes)
    except RuntimeError as problem:  # another process took memory meanwhile
        raise NoRoom(
            say("the arrays do not fit in the memory of {device}", device=driver.device),
            why=str(problem).partition("\n")[0],
            fix=(say("remove resident=True"),),
        ) from problem
    return ResidentColumn(own.view(words.shape), None, why)


def _title(entry: Entry, name: str) -> str:
    return f"{entry.names[0]}: {name}" if entry.names else name


def _check_room(driver: Driver, rest: int) -> None:
    free, total = driver.memory()
    left = max(_LEAST_LEFT, total // 10)
    if rest + _ROUNDING > free - left:
        raise NoRoom(
            say("the arrays do not fit in the memory of {device}", device=driver.device),
            why=say(
                "{size} to copy; {free} of {total} free, of which {left} stay reserved for training",
                size=format_size(rest), free=format_size(free), total=format_size(total), left=format_size(left),
            ),
            fix=(say("remove resident=True: the GPU then gathers from shared memory over PCIe"),
                 say("select fewer columns: keys=(…)")),
        )  # fmt: skip


def _drop(driver: Driver, column: ResidentColumn) -> None:
    """Unmap shared memory. torch frees its own when the tensor is deleted."""
    if column.shared is not None:
        driver.synchronize()
        column.shared.close()
