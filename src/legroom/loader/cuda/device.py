"""Batches gathered by the GPU itself from registered shared memory.

Covers: the gatherer. Does not cover: registering (cuda/register.py), streams (cuda/lane.py).

One ``index_select`` a column, on rows of wide integers, queued on the side stream: the processor sends row numbers and
is done. The rows cross PCIe once, at its speed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.loader.cuda.driver import Driver
from legroom.loader.cuda.keep import Use
from legroom.loader.cuda.lane import CudaGatherer, Queued
from legroom.loader.cuda.register import registered
from legroom.loader.cuda.rows import Rows
from legroom.words import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]


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
