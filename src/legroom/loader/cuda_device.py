"""Batches gathered by the GPU itself, from registered shared memory or from its own.

Covers: the gatherer, and its two sources. Does not cover: registering (cuda_register.py), streams (cuda_lane.py).

One ``index_select`` a column, on rows of wide integers, queued on the side stream: the processor sends row numbers and
is done. From registered memory the rows cross PCIe once, at its speed; on the card, at the memory's.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import NoRoom
from legroom.loader.cuda_driver import Driver
from legroom.loader.cuda_keep import KEEP, Use
from legroom.loader.cuda_lane import CudaGatherer, Queued
from legroom.loader.cuda_register import registered
from legroom.loader.cuda_rows import Rows
from legroom.units import format_size
from legroom.words import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
_LEAST_LEFT = 1 << 30
_ROUNDING = 2 << 20  # what torch's allocator may take beyond a large request


class DeviceGatherer(CudaGatherer):
    """Gathers what the device can see: ``sources`` are rows of integers, None where a row has no bytes."""

    def __init__(
        self,
        driver: Driver,
        rows: Mapping[str, Rows],
        sources: Mapping[str, torch.Tensor | None],
        uses: Sequence[Use[Any]],
        columns: Mapping[str, NDArray],
        *,
        path: str,
        why: str,
    ) -> None:
        super().__init__(driver, path, why)
        self._rows, self._sources, self._uses = dict(rows), dict(sources), list(uses)
        self._columns = dict(columns)  # they hold the lease of the entry

    def _start(self, rows: NDArray) -> Callable[[], Queued]:
        import torch

        driver = self.lane.driver
        self.lane.wait_for_room()
        parts: dict[str, torch.Tensor] = {}
        with self.lane.queueing():
            chosen = driver.row_numbers(rows)
            for name, source in self._sources.items():
                kind = self._rows[name]
                if source is None:
                    parts[name] = kind.empty(len(rows), driver.device)
                else:
                    parts[name] = kind.restore(torch.index_select(source, 0, chosen))
        made = self.lane.queued(parts)
        return lambda: made

    def _release(self) -> None:
        self._sources.clear()
        for use in self._uses:
            use.release()
        self._uses.clear()
        self._columns.clear()


def open_registered(
    driver: Driver,
    columns: Mapping[str, NDArray],
    rows: Mapping[str, Rows],
    files: Mapping[str, tuple[Path, int]],
) -> DeviceGatherer:
    """A gatherer on registered memory; Refused where CUDA will not register it, and nothing is left registered."""
    uses: list[Use[Any]] = []
    sources: dict[str, torch.Tensor | None] = {}
    try:
        for name, column in columns.items():
            kind = rows[name]
            if column.nbytes == 0:
                sources[name] = None
                continue
            path, offset = files[name]
            use = registered(driver, Path(path), offset, column)
            uses.append(use)
            start = use.thing.address + offset
            width = kind.width(start)
            seen = driver.window(start, column.nbytes // width, width)
            sources[name] = seen.view(kind.count, kind.nbytes // width)
    except BaseException:
        sources.clear()
        for use in uses:
            use.release()
        raise
    why = say("the shared copy is registered with CUDA; the GPU gathers from it")
    return DeviceGatherer(driver, rows, sources, uses, columns, path="cuda-registered", why=why)


def open_resident(driver: Driver, columns: Mapping[str, NDArray], rows: Mapping[str, Rows]) -> DeviceGatherer:
    """A gatherer on copies in the card's memory; NoRoom where they would not leave enough of it."""
    keys = {
        name: ("resident", str(driver.device), column.ctypes.data, column.nbytes)
        for name, column in columns.items()
    }
    uses: list[Use[Any]] = []
    sources: dict[str, torch.Tensor | None] = {}
    try:
        for name, column in columns.items():
            if column.nbytes == 0:
                sources[name] = None
                continue
            rest = sum(columns[other].nbytes for other, key in keys.items() if key not in KEEP)
            make: Callable[[], torch.Tensor] = partial(_copy, driver, column, rows[name], rest)
            use = KEEP.use(keys[name], column, make, _nothing)
            uses.append(use)
            sources[name] = use.thing
    except BaseException:
        sources.clear()
        for use in uses:
            use.release()
        raise
    size = sum(column.nbytes for column in columns.values())
    why = say("resident=True: {size} are in the card's memory", size=format_size(size))
    return DeviceGatherer(driver, rows, sources, uses, columns, path="cuda-resident", why=why)


def _copy(driver: Driver, column: NDArray, kind: Rows, rest: int) -> torch.Tensor:
    """A column on the card, if the ``rest`` of the columns, itself among them, fits there."""
    import torch

    free, total = driver.room()
    left = max(_LEAST_LEFT, total // 10)
    if rest + _ROUNDING > free - left:
        raise NoRoom(
            say("the arrays do not fit the memory of {device}", device=driver.device),
            why=say(
                "{size} are still to be copied, {free} of {total} are free and {left} must stay so for the training",
                size=format_size(rest), free=format_size(free), total=format_size(total), left=format_size(left),
            ),
            fix=("leave out resident=True: the GPU gathers from shared memory at the speed of PCIe",
                 "name fewer arrays: keys=(…)"),
        )  # fmt: skip
    contiguous = column if column.flags.c_contiguous else np.ascontiguousarray(column)
    with warnings.catch_warnings():
        # Read-only under vm.overcommit_memory=2, and only read here.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
        words = torch.from_numpy(kind.words(contiguous))
    try:
        return words.to(driver.device, copy=True)
    except RuntimeError as problem:  # others take memory at the same time
        raise NoRoom(
            say("the arrays do not fit the memory of {device}", device=driver.device),
            why=str(problem).partition("\n")[0],
            fix=("leave out resident=True",),
        ) from problem


def _nothing(_: object) -> None:
    """torch takes the memory back when the tensor dies."""
