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
    """One loop's wishes, as given."""

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
        """Whether batches stay in memory."""
        return self.device is None or str(self.device) == "cpu"

    def check(self) -> None:
        """Raise UsageError for arguments that no data could make right."""
        check_integer("batch_size", self.batch_size, 1)
        check_integer("seed", self.seed, 0)
        if self.epoch is not None:
            check_integer("epoch", self.epoch, 0)
        check_choice("format", self.format, FORMATS)
        check_choice("uneven", self.uneven, UNEVEN)
        if self.transform is not None and not callable(self.transform):
            raise UsageError(
                say("transform={value!r} cannot be called", value=self.transform),
                why=say("transform is a function of a batch, which is a dict of its columns"),
                fix=(say("transform=lambda batch: {**batch, 'images': batch['images'] / 255}"),),
            )
        if self.resident and self.on_host:
            raise UsageError(
                say("resident=True needs a device"),
                why=say(
                    "it keeps the arrays in the memory of a GPU; in this machine's memory they are already"
                ),
                fix=("device='cuda', resident=True", say("or leave resident out")),
            )
        if self.format == "torch":
            _need_torch()
        elif not self.on_host:
            raise UsageError(
                say("format={format!r} has no batches on {device}", format=self.format, device=self.device),
                why=say("numpy arrays lie in this machine's memory"),
                fix=("format='torch'", say("or leave device out")),
            )


def _need_torch() -> None:
    require(
        "torch", "torch", say("batches of tensors"), instead=(say("format='numpy' gives batches of arrays"),)
    )


def columns_of(data: CachedData, keys: str | Iterable[str] | None) -> dict[str, Column]:
    """The columns asked for: all of them, or those (or those below the groups) that ``keys`` names."""
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
            say("not every column can be in a batch: {names}", names=listed(refused)),
            why=joined(say("{name}: {why}", name=name, why=why) for name, why in refused.items()),
            fix=(_name_them(found),),
        )
    _one_length(found)
    return found


def _names(data: CachedData, asked: tuple[str, ...] | None) -> list[str]:
    named = list(data)
    if asked is not None:
        every = [*data, *(column for columns in data.columns.values() for column in columns)]
        below = {key: [name for name in every if name.startswith(key.strip("/") + "/")] for key in asked}
        named = [name for key in asked for name in ([key] if key in data else below[key] or [key])]
    # A table stands for its columns.
    return [column for name in named for column in data.columns.get(name, (name,))]


def _column(data: CachedData, name: str) -> Column:
    value = data[name]
    if isinstance(value, Ragged) or (isinstance(value, np.ndarray) and value.ndim > 0):
        return value
    raise UnsupportedData(
        say("{name} has no rows", name=name),
        why=say("it is a single value"),
        fix=(say("name the columns of the batch: keys=('images', 'labels')"),),
    )


def _one_length(columns: Mapping[str, Column]) -> None:
    lengths = {name: len(column) for name, column in columns.items()}
    if len(set(lengths.values())) == 1:
        return
    common = max(lengths.values(), key=list(lengths.values()).count, default=0)
    raise UsageError(
        say("these columns have no common number of rows"),
        why=listed(say("{name} has {rows}", name=name, rows=rows) for name, rows in lengths.items())
        or say("there is no column at all"),
        fix=(_name_them([name for name, rows in lengths.items() if rows == common]),),
    )


def _name_them(names: Iterable[str]) -> str:
    return say("name those that go together: keys=[{names}]", names=", ".join(map(repr, names)))
