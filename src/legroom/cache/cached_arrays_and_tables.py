"""``CachedData``: the opened data, as a mapping of names to arrays, ragged rows and Arrow tables.

Arrays keep their mapping and the entry's lease alive. An array that outlives its CachedData, or a closed one, stays
valid, and the entry stays leased until the last array is gone.

Iteration gives what is stored: arrays, ragged rows, tables. ``in`` and ``[]`` also take the columns of tables.
"""

from __future__ import annotations

import math
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, cast, overload
from weakref import WeakValueDictionary

import numpy as np

from legroom.cache.mapped_files_and_checksums import MappedFile, Prefault
from legroom.errors import MissingKey, UnsupportedData, UsageError
from legroom.formats.base_reader import Extent, Selection, missing_key, not_a_name
from legroom.formats.file_reads_and_errors import invalid_text
from legroom.messages import joined, listed, phrase, say
from legroom.records.cache_entry import Entry
from legroom.records.finding_and_alarm import Finding
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import import_lock, require

if TYPE_CHECKING:
    import torch

    from legroom.cache.torch_dataset import SharedDataset


NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RaggedParts:
    """The arrays of one ragged dataset."""

    offsets: str
    values: str
    text: bool
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class DataContents:
    """Everything a CachedData refers to. close() drops it as a whole."""

    entry: Entry
    arrays: Mapping[str, NDArray]
    tables: Mapping[str, Sequence[MappedFile | bytes]]  # Arrow IPC files, or their bytes, one per shard
    ragged: Mapping[str, RaggedParts]
    extent: Callable[[str], Extent | None] = lambda _: None  # where an array lies in a file, if it does
    prefault: Prefault | None = None
    keep: object = None  # the lease, in case no array holds it
    findings: tuple[Finding, ...] = ()


class CachedData(Mapping[str, Any]):
    """A read-mostly mapping of names to arrays on the shared copy."""

    def __init__(
        self,
        contents: DataContents,
        keys: tuple[str, ...] | None,
        again: tuple[Callable[..., CachedData], tuple[Any, ...]],
    ) -> None:
        selection = Selection(keys)
        self._contents: DataContents | None = _chosen(contents, selection)
        self._again = again
        self._some = keys is not None  # the caller selected keys
        self._tables = _tables(self._contents, selection)
        self._names = _names(self._contents, self._tables)
        self._columns = _column_names(self._names, self._tables)

    # The mapping.

    def __getitem__(self, name: str) -> Any:
        contents = self._open()
        if not isinstance(name, str):
            raise not_a_name(name, self._leaves())
        if name in contents.ragged:
            parts = contents.ragged[name]
            arrays = contents.arrays
            offsets, values = arrays[parts.offsets], arrays[parts.values]
            return Ragged(offsets, values, text=parts.text, shape=parts.shape, name=name)
        if name in contents.arrays:
            return contents.arrays[name]
        if name in self._tables:
            return self._tables[name].whole()
        found = self._column(name)
        if found is not None:
            table, column = found
            return table.array(column)
        missing = missing_key(name, self._leaves(), say("the data"))
        if self._some:
            raise missing
        # The last step is to omit keys, and none were given.
        raise MissingKey(missing.what, why=missing.why, fix=missing.fix[:-1])

    def rows_of(self, name: str) -> Any:
        """As ``[]``, for reading row by row: columns of a table are not joined, and may be of any type."""
        contents = self._open()
        column = isinstance(name, str) and name not in contents.ragged and name not in contents.arrays
        if (found := self._column(name) if column else None) is None or name in self._tables:
            return self[name]
        return found[0].rows(found[1])

    def __contains__(self, name: object) -> bool:
        contents = self._open()
        if name in contents.ragged or name in contents.arrays or name in self._tables:
            return True
        return isinstance(name, str) and self._column(name) is not None

    def __iter__(self) -> Iterator[str]:
        self._open()
        return iter(self._names)

    def __len__(self) -> int:
        self._open()
        return len(self._names)

    # Properties and conversions.

    @property
    def columns(self) -> Mapping[str, tuple[str, ...]]:
        """The columns of each table, by the names that ``[]`` takes. Some cannot be arrays."""
        self._open()
        return self._columns

    @property
    def info(self) -> Entry:
        """The entry: its source, its location, its arrays and tables."""
        return self._open().entry

    @property
    def attributes(self) -> Mapping[str, object]:
        """The attributes of the source file."""
        return self._open().entry.attributes

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Stores that were not used, and why."""
        return self._open().findings

    def where(self, name: str) -> Extent | None:
        """The file that an array lies in, and its offset. None if it is not in a file."""
        return self._open().extent(name)

    def tensors(self, *names: str) -> dict[str, torch.Tensor]:
        """The arrays, and the columns of tables, as torch tensors on the same memory.

        What torch cannot hold is left out. It raises if it was named, or if nothing else is left.
        """
        found: dict[str, torch.Tensor] = {}
        refused: dict[str, UnsupportedData] = {}
        columns = [column for columns in self.columns.values() for column in columns]
        for name in names or [*self._open().arrays, *columns]:
            try:
                found[name] = as_tensor(self[name], name)
            except UnsupportedData as problem:
                if names:
                    raise
                refused[name] = problem
        if refused and not found:
            raise UnsupportedData(
                say("none of these can be converted to a tensor: {names}", names=listed(refused)),
                why=joined(say("{name}: {why}", name=name, why=problem.why) for name, problem in refused.items()),
                fix=(say("use the table") if columns else say("use the numpy array"),),
            )
        return found

    def dataset(
        self,
        *names: str,
        transform: Callable[..., Any] | None = None,
        decode: Mapping[str, Callable[[Any], Any]] | None = None,
    ) -> SharedDataset:
        """A torch map-style Dataset of the rows of these arrays. ``transform`` gets one argument per array.

        Columns of tables count as arrays; rows of text, bytes, lists and structs are read as Python values. Without
        names all are used. ``decode`` maps names to functions of one value, called where the row is read, before
        ``transform``: ``decode={"jpg": read_image}``. A row of ragged bytes is passed to it as ``bytes``.
        """
        check_arguments(CachedData.dataset, locals(), ("decode",))
        with import_lock:
            from legroom.cache.torch_dataset import shared_dataset

        self._open()
        return shared_dataset(self, names or self._leaves(), transform, decode)

    def ready(self, timeout: float | None = None) -> bool:
        """Wait until every page is mapped, so that the first epoch is as fast as the second."""
        check_arguments(CachedData.ready, locals())
        prefault = self._open().prefault
        return True if prefault is None else prefault.wait(timeout)

    def close(self) -> None:
        """Release everything. Arrays that are still referenced stay valid. Calling it again does nothing."""
        self._contents, self._tables = None, {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __reduce__(self) -> tuple[object, ...]:
        self._open()
        return self._again

    def __repr__(self) -> str:
        if self._contents is None:
            return "<legroom.Data, closed>"
        entry = self._contents.entry
        shown = ", ".join(f"{name}: {_shown(self[name])}" for name in self._names[:8])
        return f"<legroom.Data on {entry.backing}: {shown}{' …' if len(self._names) > 8 else ''}>"

    def _open(self) -> DataContents:
        if self._contents is None:
            raise UsageError(say("the data is closed"), why=say("close() was called"), fix=(say("open it again"),))
        return self._contents

    def _leaves(self) -> tuple[str, ...]:
        """Every name, with a table replaced by its columns."""
        return tuple(leaf for name in self._names for leaf in self._columns.get(name, (name,)))

    def _column(self, name: str) -> tuple[StoredTable, str] | None:
        """The table and column of ``table/column``, or of ``column`` if there is one table."""
        for table, stored in self._tables.items():
            below = name.removeprefix(table + "/")
            for column in (below, name) if len(self._tables) == 1 else (below,) if below != name else ():
                if column in stored.columns:
                    return stored, column
        return None


def ragged_of(arrays: Sequence[Any]) -> Mapping[str, RaggedParts]:
    """The ragged datasets among the arrays, by name."""
    found: dict[str, RaggedParts] = {}
    for array in arrays:
        if array.ragged is not None and array.name == f"{array.ragged}/offsets":
            shape = array.attributes.get("ragged_shape")
            rows = tuple(shape) if shape is not None and math.prod(shape) == array.shape[0] - 1 else None
            text = any(other.text for other in arrays if other.ragged == array.ragged)
            found[array.ragged] = RaggedParts(array.name, f"{array.ragged}/values", text, rows)
    return found


def _chosen(contents: DataContents, selection: Selection) -> DataContents:
    """The requested part of the contents: an entry of the whole file also serves requests for parts of it."""
    if selection.keys is None:
        return contents
    return replace(
        contents,
        arrays={name: array for name, array in contents.arrays.items() if selection.takes(name)},
        ragged={name: parts for name, parts in contents.ragged.items() if selection.takes(name)},
    )


def _tables(contents: DataContents, selection: Selection) -> dict[str, StoredTable]:
    found = {}
    for name, parts in contents.tables.items():
        columns = selection.columns(name, contents.entry.tables[name].columns)
        if columns or selection.takes(name):
            found[name] = StoredTable(parts, columns)
    return found


def _names(contents: DataContents, tables: Iterable[str]) -> tuple[str, ...]:
    parts = {part for ragged in contents.ragged.values() for part in (ragged.offsets, ragged.values)}
    return (*(name for name in contents.arrays if name not in parts), *contents.ragged, *tables)


def _column_names(names: Sequence[str], tables: Mapping[str, StoredTable]) -> dict[str, tuple[str, ...]]:
    """Each table's columns, by their shortest unambiguous names."""
    found = {}
    for table, stored in tables.items():
        short = len(tables) == 1 and not any(column in names for column in stored.columns)
        found[table] = tuple(column if short else f"{table}/{column}" for column in stored.columns)
    return found


def as_tensor(array: Any, name: str) -> torch.Tensor:
    """A tensor on the same memory; UnsupportedData if torch has no such type."""
    needed = require("torch", "torch", "data.tensors()", instead=(phrase("use the numpy array"),))
    try:
        with warnings.catch_warnings():
            # Columns of tables, and everything under vm.overcommit_memory=2, are read-only to numpy: torch would
            # warn although it is intended.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            return cast("torch.Tensor", needed.from_numpy(array))
    except TypeError as problem:
        raise UnsupportedData(
            say("{name} cannot be converted to a tensor", name=name),
            why=str(problem).partition(". ")[0],
            fix=(say("use the numpy array"),),
        ) from problem


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"


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
            joined = tables[0] if len(tables) == 1 else pa.concat_tables(tables)
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
            raise invalid_text(_not_utf8(self._name, row), problem) from problem


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
    # Booleans are bits here; intervals are several numbers each.
    return pa.types.is_primitive(kind) and not (pa.types.is_boolean(kind) or pa.types.is_interval(kind))


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
        fix=(say("use the table"), *also, say("or select fixed-width columns without nulls")),
    )


_ROWS_AT_ONCE = 256  # of a loop over all rows: their offsets become Python numbers together
_COPIED_TWICE = 256 << 10  # bytes of these rows up to which they are copied twice: they stay in the CPU cache


class Ragged(Sequence[Any]):
    """A sequence of arrays, or of strings. ``offsets`` and ``values`` are the shared arrays.

    Memoryviews of both read a row: numpy makes an object of every number, which takes longer than the row's copy.
    """

    def __init__(
        self, offsets: NDArray, values: NDArray, *, text: bool, shape: tuple[int, ...] | None = None, name: str = ""
    ) -> None:
        self.offsets, self.values, self.text, self.name = offsets, values, text, name
        self._length = max(0, len(offsets) - 1)
        self.shape = shape or (self._length,)  # of the rows; they are counted in C order
        self.has_bytes = bool(values.dtype == np.uint8)  # of files or of text
        self._edges: memoryview[int] = offsets.data
        self._bytes: memoryview[int] | None = values.data if self.has_bytes else None

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            if isinstance(index, slice):
                return [self[row] for row in range(*index.indices(self._length))]
            index = int(np.ravel_multi_index(index, self.shape)) if isinstance(index, tuple) else index.__index__()
        row = index + self._length if index < 0 else index
        if not 0 <= row < self._length:
            raise IndexError(index)
        if self.text:
            try:
                return str(self.copied(row), "utf-8")
            except UnicodeDecodeError as problem:
                raise invalid_text(_not_utf8(self.name, row), problem, _read_bytes(self.name, row)) from problem
        return self.values[self._edges[row] : self._edges[row + 1]]

    def __iter__(self) -> Iterator[Any]:
        if self.text:
            return self._texts()
        return chain.from_iterable(map(self.values.__getitem__, slices) for slices in self._slices())

    def _texts(self) -> Iterator[str]:
        try:
            yield from map(_decode_text, self.all_copied())
        except UnicodeDecodeError:
            for row in range(self._length):
                self[row]  # raises, with the number of the first such row
            raise

    def copied(self, row: int) -> bytes:
        """The bytes of row 0 … len - 1, if the values are bytes."""
        assert self._bytes is not None
        return self._bytes[self._edges[row] : self._edges[row + 1]].tobytes()

    def all_copied(self) -> Iterator[bytes]:
        """The bytes of every row in order, if the values are bytes."""
        return chain.from_iterable(map(self._all_in, range(0, self._length, _ROWS_AT_ONCE)))

    def _all_in(self, first: int) -> Iterator[bytes]:
        """The rows from there on that are read at once. A slice of bytes takes less time than one of a memoryview."""
        assert self._bytes is not None
        edges = self.offsets[first : first + _ROWS_AT_ONCE + 1]
        start, end = int(edges[0]), int(edges[-1])
        if end - start > _COPIED_TWICE:
            return map(bytes, map(self._bytes.__getitem__, _slices(edges)))
        return map(self._bytes[start:end].tobytes().__getitem__, _slices(edges - start))

    def _slices(self) -> Iterator[Iterator[slice]]:
        for first in range(0, self._length, _ROWS_AT_ONCE):
            yield _slices(self.offsets[first : first + _ROWS_AT_ONCE + 1])

    def __reduce__(self) -> tuple[object, ...]:
        return _ragged, (self.offsets, self.values, self.text, self.shape, self.name)

    def __repr__(self) -> str:
        return f"<Ragged: {len(self)} × {'text' if self.text else self.values.dtype}>"


def _slices(edges: NDArray) -> Iterator[slice]:
    numbers = edges.tolist()
    return map(slice, numbers, numbers[1:])


def _decode_text(text: bytes) -> str:
    return text.decode("utf-8")


def _not_utf8(name: str, row: int) -> str:
    return say("row {row} of {name!r} is not UTF-8 text", row=row, name=name)


def _read_bytes(name: str, row: int) -> str:
    return say("or read its bytes: {code}", code=f"data[{name!r}].copied({row})")


def _ragged(offsets: NDArray, values: NDArray, text: bool, shape: tuple[int, ...], name: str = "") -> Ragged:
    return Ragged(offsets, values, text=text, shape=shape, name=name)
