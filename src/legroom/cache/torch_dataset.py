"""A torch Dataset over the opened data.

Its pickle contains only names, and the functions ``transform`` and ``decode``: a worker started by spawn attaches the
entry again. Forked workers inherit the mappings.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.cache.cached_arrays_and_tables import CachedData, Ragged, as_tensor
from legroom.cache.cached_tables import ColumnChunks, TableRows
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
        self._columns = [_Column(name, _column(data, name), self.decode.get(name)) for name in self.names]
        lengths = {column.name: len(column.values) for column in self._columns}
        if not lengths:
            raise UsageError(say("there is no array with rows"), fix=(say("open data with arrays that have rows"),))
        if len(set(lengths.values())) != 1:
            raise UsageError(
                say("these arrays have different numbers of rows"),
                why=listed(say("{name}: {rows}", name=name, rows=rows) for name, rows in lengths.items()),
                fix=(say("pass arrays of equal length: data.dataset('images', 'labels')"),),
            )
        self._length = next(iter(lengths.values()))
        self._read = [column.one for column in self._columns]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Any:
        row = index if type(index) is int else operator.index(index)
        if row < 0:
            row += self._length
        if not 0 <= row < self._length:
            raise IndexError(say("index {index} is out of bounds for {rows} rows", index=index, rows=self._length))
        if self.transform is not None:
            # A transform that works in place would change this process's copy of the data for every later epoch.
            return self.transform(*[_copied(read(row)) for read in self._read])
        return self._read[0](row) if len(self._read) == 1 else tuple([read(row) for read in self._read])

    def __iter__(self) -> Iterator[Any]:
        if self.transform is not None:
            return map(self.__getitem__, range(self._length))
        every = [column.all() for column in self._columns]
        return every[0] if len(every) == 1 else zip(*every, strict=True)

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        import torch

        chosen = torch.from_numpy(np.array(indices, np.int64))  # on the CPU, whatever the default device
        if len(chosen) and not (-self._length <= int(chosen.min()) and int(chosen.max()) < self._length):
            wrong = next(index for index in indices if not -self._length <= index < self._length)
            raise IndexError(say("index {index} is out of bounds for {rows} rows", index=wrong, rows=self._length))
        chosen = torch.where(chosen < 0, chosen + self._length, chosen)
        gathered = [column.several(chosen) for column in self._columns]
        if self.transform is not None:
            return [self.transform(*parts) for parts in zip(*gathered, strict=True)]
        return list(gathered[0]) if len(gathered) == 1 else list(zip(*gathered, strict=True))

    def __reduce__(self) -> tuple[object, ...]:
        return shared_dataset, (self.data, self.names, self.transform, self.decode)


class _Column:
    """One array of a dataset, and how its rows get into samples. What decides that is looked at once, not per row."""

    def __init__(self, name: str, values: Any, decode: Callable[[Any], Any] | None) -> None:
        self.name, self.values, self._decode = name, values, decode
        self._has_bytes = isinstance(values, Ragged) and values.has_bytes and not values.text
        self._as_bytes = decode is bytes and self._has_bytes  # bytes(b) is b
        self.one: Callable[[int], Any] = self._decoded
        if decode is None or self._as_bytes:
            self.one = values.__getitem__ if decode is None else values.copied

    def all(self) -> Iterator[Any]:
        """Every row in order, as ``one`` returns them."""
        if not isinstance(self.values, Ragged):
            return map(self.one, range(len(self.values)))
        if self._decode is None:
            return iter(self.values)
        parts = self.values.all_copied() if self._has_bytes else map(_copied, self.values)
        if self._as_bytes:
            return parts
        return map(self._call, parts, range(len(self.values)))

    def several(self, rows: torch.Tensor) -> Iterable[Any]:
        """Copies of these rows. A row is decoded when it is its turn, so that random numbers come sample by sample."""
        if self._decode is not None:
            return map(self.one, rows.tolist())
        return _gather(self.values, rows)  # type: ignore[no-any-return]

    def _decoded(self, row: int) -> Any:
        return self._call(self.values.copied(row) if self._has_bytes else _copied(self.values[row]), row)

    def _call(self, part: Any, row: int) -> Any:
        assert self._decode is not None
        try:
            return self._decode(part)
        except Exception as problem:
            problem.add_note(say("decode[{name!r}] raised this for row {row}", name=self.name, row=row))
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


def _copied(part: Any) -> Any:
    if isinstance(part, np.ndarray):
        return part.copy()
    return part.clone() if hasattr(part, "clone") else part


def _column(data: CachedData, name: str) -> Any:
    value = data.rows_of(name)
    if isinstance(value, (Ragged, TableRows)):
        return value
    if isinstance(value, ColumnChunks):
        return _Chunks(value)
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


class _Chunks:
    """The rows of a column in several record batches: as tensors, or as arrays where torch has no such type."""

    def __init__(self, column: ColumnChunks) -> None:
        import torch

        self._column = column
        self._wrap: Callable[[Any], Any] = torch.from_numpy
        try:
            as_tensor(column.chunks[0], "")  # torch warns of read-only memory once, and this is intended
        except UnsupportedData:
            self._wrap = lambda array: array

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: int) -> Any:
        chunk, within = self._column.locate(row)
        return self._wrap(chunk)[within]

    def take(self, rows: torch.Tensor) -> Any:
        """A copy of these rows."""
        return self._wrap(self._column.take(rows.numpy()))


def _gather(column: Any, indices: torch.Tensor) -> Any:
    import torch

    if isinstance(column, torch.Tensor):
        return torch.index_select(column, 0, indices)
    if isinstance(column, _Chunks):
        return column.take(indices)
    if isinstance(column, Ragged):
        return [_copied(column[row]) for row in indices.tolist()]
    if isinstance(column, TableRows):
        return [column[row] for row in indices.tolist()]
    return np.take(column, indices.numpy(), axis=0)
