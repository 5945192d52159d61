"""Which way a batch takes: gathered in memory, or on a CUDA device.

Covers: choosing, and batches of which a part must stay in memory. Does not cover: the ways themselves (gather.py,
cuda.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.loader.rows.gather import Batch, Column, Gatherer, HostGatherer, torch_holds
from legroom.loader.rows.settings import BatchSettings
from legroom.words import listed, say

if TYPE_CHECKING:
    from legroom.loader.open import Data

NDArray = np.ndarray[Any, Any]
_WARM = 2  # gatherers that a Data keeps: to train and to evaluate


def gatherer_for(data: Data, columns: Mapping[str, Column], settings: BatchSettings) -> Gatherer:
    """The gatherer of these columns for what was asked."""
    tensor = None
    if settings.format == "torch":
        import torch

        tensor = torch.from_numpy
    if settings.on_host:
        key = (tuple(columns), settings.batch_size, settings.format)
        found = data.warm.pop(key, None) or HostGatherer(columns, settings.batch_size, tensor)
        data.warm[key] = found
        while len(data.warm) > _WARM:
            data.warm.pop(next(iter(data.warm)))
        return found
    movable = {name: column for name, column in columns.items() if _is_tensor(column)}
    if not movable:
        raise UnsupportedData(
            say(
                "none of the columns can be on {device}: {names}",
                device=settings.device,
                names=listed(columns),
            ),
            why=say("rows of different lengths, texts and dates stay in memory"),
            fix=(say("leave device out"), say("or name a column of numbers: keys=(…)")),
        )
    on_device = _on_device(data, movable, settings)
    rest = {name: column for name, column in columns.items() if name not in movable}
    return (
        Joined(on_device, HostGatherer(rest, settings.batch_size, tensor), list(columns))
        if rest
        else on_device
    )


class Joined:
    """A batch of two parts: what the device can hold, and the rest in memory."""

    def __init__(self, first: Gatherer, rest: Gatherer, names: list[str]) -> None:
        self._first, self._rest, self._names = first, rest, names

    @property
    def path(self) -> str:
        """The device's way, which may change (cuda/staged.py)."""
        return self._first.path

    @property
    def why(self) -> str:
        return self._first.why

    def gather(self, rows: NDArray) -> Batch:
        parts = {**self._first.gather(rows), **self._rest.gather(rows)}
        return {name: parts[name] for name in self._names}

    def begin(self, rows: NDArray) -> None:
        """Tell both."""
        self._first.begin(rows)
        self._rest.begin(rows)

    def close(self) -> None:
        """Close both."""
        self._first.close()
        self._rest.close()


def _is_tensor(column: Column) -> bool:
    return isinstance(column, np.ndarray) and torch_holds(column.dtype)


def _on_device(data: Data, columns: Mapping[str, Any], settings: BatchSettings) -> Gatherer:
    from legroom.loader.cuda.ways import open_gatherer

    found = {name: data.where(name) for name in columns}
    files = {name: (extent.path, extent.offset) for name, extent in found.items() if extent is not None}
    return open_gatherer(columns, data.info, settings.device, resident=settings.resident, files=files)
