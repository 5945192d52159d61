"""A torch Dataset over the opened data.

Its pickle contains only names, and the functions ``transform`` and ``decode``: a worker started by spawn attaches the
entry again. Forked workers inherit the mappings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.cache.cached_arrays_and_tables import CachedData, Ragged, TableRows
from legroom.errors import UnsupportedData, UsageError
from legroom.messages import listed, say
from legroom.system.lazy_and_optional_imports import require

if TYPE_CHECKING:
    import torch


Decode = Mapping[str, Callable[[Any], Any]]


def shared_dataset(
    data: CachedData, names: Sequence[str], transform: Callable[..., Any] | None = None, decode: Decode | None = None
) -> SharedDataset:
    """The rows of these arrays, as a torch Dataset."""
    return _torch_class()(data, names, transform, decode)


@cache
def _torch_class() -> type[SharedDataset]:
    """A class of SharedDataset and torch's Dataset, created when torch is first needed."""
    Dataset = require("torch.utils.data", "torch", "data.dataset()").Dataset  # noqa: N806
    return type("SharedDataset", (SharedDataset, Dataset), {"__module__": __name__})


class SharedDataset:
    """Rows of some arrays of the data. One array gives its row, several give a tuple of rows."""

    def __init__(
        self,
        data: CachedData,
        names: Sequence[str],
        transform: Callable[..., Any] | None = None,
        decode: Decode | None = None,
    ) -> None:
        self.data, self.names, self.transform = data, tuple(names), transform
        self.decode = _checked(decode, self.names)
        self._columns = [_column(data, name) for name in self.names]
        self._bytes = {name for name, column in zip(self.names, self._columns, strict=True) if _has_bytes(column)}
        lengths = {name: len(column) for name, column in zip(self.names, self._columns, strict=True)}
        if len(set(lengths.values())) != 1:
            raise UsageError(
                say("these arrays have different numbers of rows"),
                why=listed(say("{name}: {rows}", name=name, rows=rows) for name, rows in lengths.items())
                or say("there is no array with rows"),
                fix=(say("pass arrays of equal length: data.dataset('images', 'labels')"),),
            )
        self._length = next(iter(lengths.values()))

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = operator.index(index)
        if not -self._length <= row < self._length:
            raise IndexError(index)
        return self._sample([column[row] for column in self._columns], row, shared=True)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        import torch

        chosen = torch.from_numpy(np.array(indices, np.int64))  # on the CPU, whatever the default device
        if len(chosen) and not (-self._length <= int(chosen.min()) and int(chosen.max()) < self._length):
            raise IndexError(indices)
        chosen = torch.where(chosen < 0, chosen + self._length, chosen)
        gathered = [_gather(column, chosen) for column in self._columns]
        rows = chosen.tolist()
        return [self._sample([part[at] for part in gathered], row, shared=False) for at, row in enumerate(rows)]

    def __reduce__(self) -> tuple[object, ...]:
        return shared_dataset, (self.data, self.names, self.transform, self.decode)

    def _sample(self, parts: list[Any], row: int, *, shared: bool) -> Any:
        if self.decode:
            parts = [self._decoded(name, part, row) for name, part in zip(self.names, parts, strict=True)]
        if self.transform is not None:
            # A transform that works in place would change this process's copy of the data for every later epoch.
            if shared:
                parts = [_copied(part) for part in parts]
            return self.transform(*parts)
        return parts[0] if len(parts) == 1 else tuple(parts)

    def _decoded(self, name: str, part: Any, row: int) -> Any:
        function = self.decode.get(name)
        if function is None:
            return part
        try:
            return function(part.tobytes() if name in self._bytes else _copied(part))
        except Exception as problem:
            problem.add_note(say("decode[{name!r}] raised this for row {row}", name=name, row=row))
            raise


def _checked(decode: Decode | None, names: Sequence[str]) -> dict[str, Callable[[Any], Any]]:
    """The functions by name; UsageError for a name that is not read, or what is not a function."""
    if decode is None:
        return {}
    if not isinstance(decode, Mapping) or not all(callable(function) for function in decode.values()):
        raise UsageError(
            say("decode={given!r} is not a mapping of names to functions", given=decode),
            fix=(say("pass for example {example}", example="decode={'jpg': read_image}"),),
        )
    for name in decode:
        if name not in names:
            raise UsageError(
                say("decode has a function for {name!r}, which is not read", name=name),
                why=say("the dataset reads {names}", names=listed(map(repr, names))),
                fix=(say("pass the same names: {example}", example="data.dataset('jpg', decode={'jpg': read_image})"),),
            )
    return dict(decode)


def _has_bytes(column: Any) -> bool:
    return isinstance(column, Ragged) and not column.text and column.values.dtype == np.uint8


def _copied(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.copy()
    return part.clone() if hasattr(part, "clone") else part


def _column(data: CachedData, name: str) -> Any:
    try:
        value = data[name]
    except UnsupportedData:
        rows = data.column_rows(name)
        if rows is None:
            raise
        return rows
    if isinstance(value, Ragged):
        return value
    if not isinstance(value, np.ndarray) or value.ndim == 0:
        raise UsageError(
            say("{name} has no rows for a dataset", name=name),
            why=say("it is a table or a single value"),
            fix=(say("pass names of arrays, or columns as table/column"),),
        )
    try:
        return data.tensors(name)[name]
    except UnsupportedData:
        return value  # strings, dates: rows as numpy arrays


def _gather(column: Any, indices: torch.Tensor) -> Any:
    import torch

    if isinstance(column, torch.Tensor):
        return torch.index_select(column, 0, indices)
    if isinstance(column, Ragged):
        return [_copied(column[row]) for row in indices.tolist()]
    if isinstance(column, TableRows):
        return [column[row] for row in indices.tolist()]
    return np.take(column, indices.numpy(), axis=0)
