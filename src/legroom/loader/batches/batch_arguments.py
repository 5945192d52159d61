"""Checks the arguments of ``data.batches`` and selects the columns of a batch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.cache.cached_data import Ragged
from legroom.errors import UnsupportedData, UsageError
from legroom.formats.selection import Selection
from legroom.loader.batches.gather import Column
from legroom.loader.sampling import UNEVEN, Uneven
from legroom.system.argument_checks import check_choice, check_integer
from legroom.system.imports import require
from legroom.words import joined, listed, say

if TYPE_CHECKING:
    from legroom.cache.cached_data import CachedData


FORMATS = ("torch", "numpy")


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """The arguments of ``data.batches``, as given."""

    batch_size: int
    shuffle: bool = False
    seed: int = 0
    epoch: int | None = None
    device: Any = None
    format: str = "torch"
    keys: str | Iterable[str] | None = None
    drop_last: bool = False
    rank: int | None = None
    world_size: int | None = None
    uneven: Uneven = "pad"
    transform: Callable[[dict[str, Any]], Any] | None = None
    resident: bool = False

    @property
    def on_host(self) -> bool:
        """Whether batches stay in RAM."""
        return self.device is None or str(self.device) == "cpu"

    def check(self) -> None:
        """Raise UsageError for arguments that are invalid for any data."""
        check_integer("batch_size", self.batch_size, 1)
        check_integer("seed", self.seed, 0)
        if self.epoch is not None:
            check_integer("epoch", self.epoch, 0)
        check_choice("format", self.format, FORMATS)
        check_choice("uneven", self.uneven, UNEVEN)
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                say("transform must be callable (got {value!r})", value=self.transform),
                why=say("transform receives a batch: a dict of columns"),
                fix=(say("transform=lambda batch: {**batch, 'images': batch['images'] / 255}"),),
            )
        if self.resident and self.on_host:
            raise UsageError(
                say("resident=True needs a device"),
                why=say("it keeps the arrays in GPU memory; they are in RAM already"),
                fix=("device='cuda', resident=True", say("or remove resident=True")),
            )
        if self.format == "torch":
            _require_torch()
        elif not self.on_host:
            raise UsageError(
                say(
                    "format={format!r} cannot be used with device={device}",
                    format=self.format,
                    device=self.device,
                ),
                why=say("numpy arrays are in RAM, not in GPU memory"),
                fix=("format='torch'", say("or remove device")),
            )


def _require_torch() -> None:
    require(
        "torch",
        "torch",
        say("batches of tensors"),
        instead=(say("format='numpy' returns arrays and needs no torch"),),
    )


def columns_of(data: CachedData, keys: str | Iterable[str] | None) -> dict[str, Column]:
    """The columns of a batch: all of them, or those that ``keys`` selects by name or group."""
    asked = Selection(keys).keys
    found: dict[str, Column] = {}
    refused: dict[str, str] = {}
    for name in _names(data, asked):
        try:
            found[name] = _column(data, name)
        except UnsupportedData as problem:
            if asked is not None:
                raise
            refused[name] = problem.why
    if refused:
        raise UnsupportedData(
            say("these columns cannot be part of a batch: {names}", names=listed(refused)),
            why=joined(say("{name}: {why}", name=name, why=why) for name, why in refused.items()),
            fix=(_select_these(found),),
        )
    _require_same_length(found)
    return found


def _names(data: CachedData, asked: tuple[str, ...] | None) -> list[str]:
    named = list(data)
    if asked is not None:
        every = [*data, *(column for columns in data.columns.values() for column in columns)]
        below = {key: [name for name in every if name.startswith(key.strip("/") + "/")] for key in asked}
        named = [name for key in asked for name in ([key] if key in data else below[key] or [key])]
    # A table is replaced by its columns.
    return [column for name in named for column in data.columns.get(name, (name,))]


def _column(data: CachedData, name: str) -> Column:
    value = data[name]
    if isinstance(value, Ragged) or (isinstance(value, np.ndarray) and value.ndim > 0):
        return value
    raise UnsupportedData(
        say("{name} has no rows", name=name),
        why=say("it is a scalar"),
        fix=(say("select the columns of the batch: keys=('images', 'labels')"),),
    )


def _require_same_length(columns: Mapping[str, Column]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) == 1:
        return
    common = max(lengths.values(), key=list(lengths.values()).count, default=0)
    raise UsageError(
        say("the columns have different numbers of rows"),
        why=listed(say("{name} has {rows}", name=name, rows=rows) for name, rows in lengths.items())
        or say("there are no columns"),
        fix=(_select_these([name for name, rows in lengths.items() if rows == common]),),
    )


def _select_these(names: Iterable[str]) -> str:
    return say("select the columns: keys=[{names}]", names=", ".join(map(repr, names)))
