"""The tables of opened data: Arrow IPC files, one per shard, as one ``pyarrow.Table``; columns as arrays, or by row.

Columns of fixed width are views of the mapped files wherever Arrow allows it.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from legroom.cache.mapped_files_and_checksums import MappedFile
from legroom.errors import UnsupportedData
from legroom.formats.file_reads_and_errors import invalid_text
from legroom.messages import say

NDArray = np.ndarray[Any, Any]


class StoredTable:
    """The requested columns of one table: Arrow IPC files, one per shard.

    A column in one record batch is a view of the mapping. One in several is joined if it is wanted as an array, which
    copies it once for as long as it is referenced. Batches and datasets read its rows where they are.
    """

    def __init__(self, parts: Sequence[MappedFile | bytes], columns: Sequence[str]) -> None:
        self.columns = tuple(columns)
        self._parts = parts
        self._opened: Any = None
        self._arrays: WeakValueDictionary[str, NDArray] = WeakValueDictionary()

    def whole(self) -> Any:
        """The table as a pyarrow.Table. Nothing is read until it is used."""
        if self._opened is None:
            import pyarrow as pa

            tables = [pa.ipc.open_file(pa.BufferReader(_buffer(part))).read_all() for part in self._parts]
            joined = tables[0] if len(tables) == 1 else _joined_tables(tables)
            # An entry of the whole file also serves requests for some of its columns.
            stored = joined.column_names == list(self.columns)
            self._opened = joined if stored else joined.select(list(self.columns))
        return self._opened

    def array(self, column: str) -> NDArray:
        """A column of fixed width without nulls."""
        array = self._arrays.get(column)
        if array is None:
            array = self._arrays[column] = _array(self.whole().column(column), column)
        return array

    def rows(self, column: str) -> NDArray | ColumnChunks | TableRows:
        """A column to read row by row: not joined where it is in several record batches, unless it is already."""
        stored = self.whole().column(column)
        if not _is_fixed(stored.type):
            return TableRows(stored, column)
        if stored.num_chunks < 2 or column in self._arrays or stored.null_count:
            return self.array(column)
        chunks = [_values(chunk, column) for chunk in stored.chunks if len(chunk)]
        found = ColumnChunks.within(chunks, [np.frombuffer(_bytes(part), np.uint8) for part in self._parts])
        return self.array(column) if found is None else found


def _joined_tables(tables: Sequence[Any]) -> Any:
    """Tables with the same columns as one, without a copy: in the first one's order, whatever the others' is.

    A column may be null if it may be in one of them. Metadata that differ are left out, as attributes are, but for
    pandas': it says how ``to_pandas`` converts, and holds the number of rows.
    """
    import pyarrow as pa

    first = tables[0].schema
    if all(table.schema.equals(first, check_metadata=True) for table in tables[1:]):
        return pa.concat_tables(tables)
    schemas = [pa.schema([table.schema.field(name) for name in first.names], table.schema.metadata) for table in tables]
    fields = []
    for name in first.names:
        every = [schema.field(name) for schema in schemas]
        nullable, metadata = any(one.nullable for one in every), _metadata_of_all(every)
        fields.append(pa.field(name, every[0].type, nullable, metadata))
    schema = pa.schema(fields, _metadata_of_all(schemas, (b"pandas", b"huggingface")))
    try:
        return pa.concat_tables([table.select(first.names).cast(schema) for table in tables])
    except pa.ArrowException as problem:  # types with one name that are not the same
        raise UnsupportedData(
            say("cannot join {name} across files", name="table"),
            why=(str(problem).splitlines() or [type(problem).__name__])[0],
            fix=(say("open the files one by one, or pass the common names with keys="),),
        ) from problem


def _metadata_of_all(parts: Sequence[Any], kept: Sequence[bytes] = ()) -> dict[bytes, bytes]:
    every = [part.metadata or {} for part in parts]
    return {
        name: value
        for name, value in every[0].items()
        if name in kept or all(other.get(name) == value for other in every[1:])
    }


class TableRows:
    """A column of a table, row by row: str, bytes, bool, dict, None; lists of numbers as arrays."""

    def __init__(self, column: Any, name: str) -> None:
        import pyarrow as pa

        kind = column.type
        self._column, self._name = column, name
        self._numbers = (pa.types.is_list(kind) or pa.types.is_large_list(kind)) and _is_fixed(kind.value_type)

    def __len__(self) -> int:
        return len(self._column)

    def __getitem__(self, row: int) -> Any:
        value = self._column[row]
        if self._numbers and value.is_valid and not value.values.null_count:
            return np.array(_values(value.values, ""))  # a copy that may be written to
        try:
            return value.as_py()
        except UnicodeDecodeError as problem:
            raise invalid_text(not_utf8(self._name, row), problem) from problem


class ColumnChunks:
    """A column whose rows lie in several places of some files: rows are read there, and nothing is joined.

    A joined copy would be this process's own: eight processes would have eight.
    """

    def __init__(self, chunks: Sequence[NDArray], files: Sequence[NDArray], places: Sequence[tuple[int, int]]) -> None:
        """``places``: the file of each chunk, and the byte in it where the chunk starts."""
        first = chunks[0]
        self.chunks, self.dtype = chunks, first.dtype
        self._ends = np.cumsum([len(chunk) for chunk in chunks])
        self._starts = [0, *self._ends[:-1].tolist()]
        self.shape = (int(self._ends[-1]), *first.shape[1:])
        self._row = first.nbytes // len(first)
        self._file = np.array([file for file, _ in places])
        # Where row 0 would lie if the chunk began with it.
        self._shift = np.array([at for _, at in places]) - np.array(self._starts) * self._row
        # Rows as single items that begin at every byte: numpy copies such an item as fast as a row.
        self._items = [
            np.ndarray((max(0, len(file) - self._row + 1),), f"V{self._row}", file, strides=(1,)) for file in files
        ]

    @classmethod
    def within(cls, chunks: Sequence[NDArray], files: Sequence[NDArray]) -> ColumnChunks | None:
        """None if the rows have no bytes, or a chunk is not in a file: Arrow converts some types into new memory."""
        bounds = [(_address(file), _address(file) + file.nbytes) for file in files]
        places = []
        for chunk in chunks:
            start = _address(chunk)
            inside = [at for at, (low, high) in enumerate(bounds) if low <= start and start + chunk.nbytes <= high]
            if not chunk.nbytes or not chunk.flags.c_contiguous or not inside:
                return None
            places.append((inside[0], start - bounds[inside[0]][0]))
        return cls(chunks, files, places) if places else None

    def __len__(self) -> int:
        return int(self.shape[0])

    def locate(self, row: int) -> tuple[NDArray, int]:
        """The chunk of row 0 … len - 1, and its number within."""
        chunk = bisect_right(self._starts, row) - 1
        return self.chunks[chunk], row - self._starts[chunk]

    def take(self, rows: NDArray) -> NDArray:
        """A copy of rows 0 … len - 1, in this order."""
        chunk = np.searchsorted(self._ends, rows, side="right")
        at = rows * self._row + self._shift[chunk]
        if len(self._items) == 1:
            found = self._items[0][at]
        else:
            found, file = np.empty(len(rows), self._items[0].dtype), self._file[chunk]
            for number in np.unique(file).tolist():
                chosen = np.flatnonzero(file == number)
                found[chosen] = self._items[number][at[chosen]]
        taken: NDArray = found.view(self.dtype).reshape(len(rows), *self.shape[1:])
        return taken


def _address(array: NDArray) -> int:
    return int(array.__array_interface__["data"][0])


def _bytes(part: MappedFile | bytes) -> Any:
    return part if isinstance(part, bytes) else part.buffer()


def _buffer(part: MappedFile | bytes) -> Any:
    """A buffer for pyarrow that keeps the mapping alive."""
    import pyarrow as pa

    return pa.py_buffer(_bytes(part))


def _array(column: Any, name: str) -> NDArray:
    kind = column.type
    if not _is_fixed(kind):
        by_row = say("or read it row by row: data.dataset(…)")
        raise _cannot(name, say("its type is {kind}, which is not fixed-width", kind=kind), by_row)
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    return _values(chunk, name)


def _is_fixed(kind: Any) -> bool:
    import pyarrow as pa

    if isinstance(kind, pa.FixedShapeTensorType) or pa.types.is_fixed_size_list(kind):
        return _is_fixed(kind.value_type)
    # Booleans are bits here; intervals are several numbers each; numpy has no type for a time of day.
    others = pa.types.is_boolean, pa.types.is_interval, pa.types.is_time
    return pa.types.is_primitive(kind) and not any(test(kind) for test in others)


def _values(chunk: Any, name: str) -> NDArray:
    """The numbers of an array without nulls, at any depth of fixed-size lists."""
    import pyarrow as pa

    kind = chunk.type
    if chunk.null_count:
        raise _cannot(name, say("its type is {kind} and it has {nulls} nulls", kind=kind, nulls=chunk.null_count))
    if isinstance(kind, pa.FixedShapeTensorType):
        return chunk.to_numpy_ndarray() if len(chunk) else np.empty((0, *kind.shape), _dtype(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        inner = _values(chunk.flatten(), name)
        return inner.reshape(len(chunk), kind.list_size, *inner.shape[1:])
    array: NDArray = chunk.to_numpy(zero_copy_only=False)
    return array


def _dtype(kind: Any) -> Any:
    return kind.to_pandas_dtype()


def _cannot(name: str, why: str, *also: str) -> UnsupportedData:
    return UnsupportedData(
        say("column {name} cannot be read as an array", name=name),
        why=why,
        fix=(
            say("use the Arrow table, for example data['table'].column({name!r})", name=name),
            *also,
            say("for batches, select fixed-width columns without nulls: data.batches(64, keys=['a', 'b'])"),
        ),
    )


def not_utf8(name: str, row: int) -> str:
    """What is wrong with a row of text."""
    return say("row {row} of {name!r} is not UTF-8 text", row=row, name=name)
