"""A table of an entry: Arrow IPC files, mapped, and its columns as arrays.

Covers: one file or one a shard, the columns that were asked for, columns of fixed width as numpy arrays.
Does not cover: which tables there are (dataset.py), writing them (formats).

The files were mapped with the entry (attach.py), as arrays are, private and writable: a tensor on a column may be
written to, and changes this process's pages alone. A column that lies in one record batch is a view of the map. One
in several is joined, which copies: once, for as long as somebody holds it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from legroom.cache.maps import Map
from legroom.errors import UnsupportedData
from legroom.words import say

NDArray = np.ndarray[Any, Any]


class StoredTable:
    """The columns of one table that were asked for."""

    def __init__(self, parts: Sequence[Map | bytes], columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._parts = parts
        self._opened: Any = None
        self._arrays: WeakValueDictionary[str, NDArray] = WeakValueDictionary()

    def whole(self) -> Any:
        """As a pyarrow.Table; nothing is read until it is used."""
        if self._opened is None:
            import pyarrow as pa

            tables = [pa.ipc.open_file(pa.BufferReader(_buffer(part))).read_all() for part in self._parts]
            joined = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
            # An entry of the whole file serves those who asked for some of its columns, too.
            stored = joined.column_names == list(self.columns)
            self._opened = joined if stored else joined.select(list(self.columns))
        return self._opened

    def array(self, column: str) -> NDArray:
        """A column of fixed width without nulls."""
        array = self._arrays.get(column)
        if array is None:
            array = self._arrays[column] = _array(self.whole().column(column), column)
        return array


def _buffer(part: Map | bytes) -> Any:
    """What pyarrow reads from; it keeps the map alive."""
    import pyarrow as pa

    return pa.py_buffer(part if isinstance(part, bytes) else part.buffer())


def _array(column: Any, name: str) -> NDArray:
    kind = column.type
    if not _is_fixed(kind):
        raise _cannot(name, say("it is {kind}, and not numbers that lie one after the other", kind=kind))
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return _values(chunk, name)


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    # Booleans are bits here; intervals are several numbers each.
    return pa.types.is_primitive(kind) and not (pa.types.is_boolean(kind) or pa.types.is_interval(kind))


def _values(chunk: Any, name: str) -> NDArray:
    """The numbers of an array without nulls, at any depth of fixed-size lists."""
    import pyarrow as pa

    kind = chunk.type
    if chunk.null_count:
        raise _cannot(name, say("it is {kind} with {nulls} nulls", kind=kind, nulls=chunk.null_count))
    if isinstance(kind, pa.FixedShapeTensorType):
        return chunk.to_numpy_ndarray() if len(chunk) else np.empty((0, *kind.shape), _dtype(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        inner = _values(chunk.flatten(), name)
        return inner.reshape(len(chunk), kind.list_size, *inner.shape[1:])
    array: NDArray = chunk.to_numpy(zero_copy_only=False)
    return array


def _dtype(kind: Any) -> Any:
    return kind.to_pandas_dtype()


def _cannot(name: str, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("column {name} cannot be an array", name=name),
        why=why,
        fix=(say("use the table itself"), say("or name the columns that can be")),
    )
