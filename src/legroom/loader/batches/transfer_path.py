"""Chooses the path that batches take, and reports why (``Batches.path``, ``Batches.why``).

    cpu               gathered in this process's memory                       no device
    cuda-resident     arrays in GPU memory, gathered there                    resident=True
    cuda-registered   shared copy registered with CUDA, gathered by the GPU   entries in shared memory
    cuda-pinned       gathered into page-locked buffers, then copied          entries on disk, or registering failed
    cuda-copy         gathered into ordinary memory, then copied              where page-locking failed too

Entries on disk are not registered: that would read all of them into RAM and lock them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.loader.batches.batch_arguments import BatchSettings
from legroom.loader.batches.gather import Batch, Column, Gatherer, HostGatherer, torch_holds
from legroom.records import Entry
from legroom.words import listed, say

if TYPE_CHECKING:
    from legroom.loader.batches.cuda_driver import Driver
    from legroom.loader.batches.open_data import Data


NDArray = np.ndarray[Any, Any]
_KEPT_GATHERERS = 2  # per Data: one to train and one to evaluate


def gatherer_for(data: Data, columns: Mapping[str, Column], settings: BatchSettings) -> Gatherer:
    """The gatherer of these columns for these settings."""
    tensor = None
    if settings.format == "torch":
        import torch

        tensor = torch.from_numpy
    if settings.on_host:
        key = (tuple(columns), settings.batch_size, settings.format)
        found = data.gatherers.pop(key, None) or HostGatherer(columns, settings.batch_size, tensor)
        data.gatherers[key] = found
        while len(data.gatherers) > _KEPT_GATHERERS:
            data.gatherers.pop(next(iter(data.gatherers)))
        return found
    movable = {name: column for name, column in columns.items() if _is_tensor(column)}
    if not movable:
        raise UnsupportedData(
            say(
                "none of these columns can be copied to {device}: {names}",
                device=settings.device,
                names=listed(columns),
            ),
            why=say("rows of different lengths, text and dates stay in RAM"),
            fix=(say("remove device"), say("or select a numeric column: keys=(…)")),
        )
    on_device = _on_device(data, movable, settings)
    rest = {name: column for name, column in columns.items() if name not in movable}
    return (
        SplitGatherer(on_device, HostGatherer(rest, settings.batch_size, tensor), list(columns))
        if rest
        else on_device
    )


class SplitGatherer:
    """Batches of two parts: columns on the device, and the rest in RAM."""

    def __init__(self, first: Gatherer, rest: Gatherer, names: list[str]) -> None:
        self._first, self._rest, self._names = first, rest, names

    @property
    def path(self) -> str:
        """The path on the device, which may change (cuda_pinned.py)."""
        return self._first.path

    @property
    def why(self) -> str:
        return self._first.why

    def gather(self, rows: NDArray) -> Batch:
        parts = {**self._first.gather(rows), **self._rest.gather(rows)}
        return {name: parts[name] for name in self._names}

    def begin(self, rows: NDArray) -> None:
        """Pass the hint to both."""
        self._first.begin(rows)
        self._rest.begin(rows)

    def close(self) -> None:
        """Close both."""
        self._first.close()
        self._rest.close()


def _is_tensor(column: Column) -> bool:
    return isinstance(column, np.ndarray) and torch_holds(column.dtype)


def _on_device(data: Data, columns: Mapping[str, Any], settings: BatchSettings) -> Gatherer:

    found = {name: data.where(name) for name in columns}
    files = {name: (extent.path, extent.offset) for name, extent in found.items() if extent is not None}
    return open_gatherer(columns, data.info, settings.device, resident=settings.resident, files=files)


def open_gatherer(
    columns: Mapping[str, NDArray],
    entry: Entry,
    device: object,
    *,
    resident: bool = False,
    files: Mapping[str, tuple[Path, int]],
    driver: Driver | None = None,
) -> Gatherer:
    """The gatherer on a CUDA device; ``files`` has the file and the offset of each column.

    ``driver`` is the device's unless a test passes its own.
    """
    # Here, so that batches in RAM do not load the CUDA modules.
    from legroom.loader.batches.cuda_driver import CudaRefused, open_driver
    from legroom.loader.batches.cuda_gather import row_layout
    from legroom.loader.batches.cuda_pinned import PinnedGatherer
    from legroom.loader.batches.cuda_registered import open_registered
    from legroom.loader.batches.cuda_resident import open_resident

    driver = driver or open_driver(device)
    rows = {name: row_layout(name, column) for name, column in columns.items()}
    if resident:
        return open_resident(driver, columns, rows)
    why = _why_not_registered(entry, columns, files) or driver.why_no_registering()
    if why is None:
        try:
            return open_registered(driver, columns, rows, files)
        except CudaRefused as refusal:
            why = say("CUDA did not register the shared copy: {refusal}", refusal=refusal)
    return PinnedGatherer(driver, columns, rows, why)


def _why_not_registered(
    entry: Entry, columns: Mapping[str, NDArray], files: Mapping[str, tuple[Path, int]]
) -> str | None:
    """Why registering is not attempted, or None."""
    if entry.backing == "disk":
        return say("the entry is on disk; registering it would lock all of it in RAM")
    if entry.backing != "shm":
        return say("the data are not in the shared cache ({backing})", backing=entry.backing)
    for name, column in columns.items():
        if column.nbytes and (name not in files or not column.flags.c_contiguous):
            return say("{name} is not a contiguous array in a file of the cache", name=name)
    return None
