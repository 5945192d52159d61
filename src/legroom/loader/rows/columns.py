"""Which columns a batch has.

Covers: arrays, ragged rows and the columns of tables by name, one number of rows for all of them. Does not cover:
gathering them (gather.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

import numpy as np

from legroom.cache.ragged import Ragged
from legroom.errors import UnsupportedData, UsageError
from legroom.formats.selection import Selection
from legroom.loader.rows.gather import Column
from legroom.words import joined, listed, say

if TYPE_CHECKING:
    from legroom.cache.dataset import Data


def columns_of(data: Data, keys: str | Iterable[str] | None) -> dict[str, Column]:
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


def _names(data: Data, asked: tuple[str, ...] | None) -> list[str]:
    named = list(data)
    if asked is not None:
        every = [*data, *(column for columns in data.columns.values() for column in columns)]
        below = {key: [name for name in every if name.startswith(key.strip("/") + "/")] for key in asked}
        named = [name for key in asked for name in ([key] if key in data else below[key] or [key])]
    # A table stands for its columns.
    return [column for name in named for column in data.columns.get(name, (name,))]


def _column(data: Data, name: str) -> Column:
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
