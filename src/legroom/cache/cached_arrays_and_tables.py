"""``CachedData``: the opened data, as a mapping of names to arrays, ragged rows and Arrow tables.

Arrays keep their mapping and the entry's lease alive. An array that outlives its CachedData, or a closed one, stays
valid, and the entry stays leased until the last array is gone.

Iteration gives what is stored: arrays, ragged rows, tables. ``in`` and ``[]`` also take the columns of tables.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING, Any, Self, cast, overload

import numpy as np

from legroom.cache.cached_tables import StoredTable, not_utf8
from legroom.cache.mapped_files_and_checksums import MappedFile, Prefault
from legroom.errors import BadArgumentType, MissingKey, UnsupportedData, UsageError
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
        missing = missing_key(name, (*self._tables, *self._leaves()), say("the data"))
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

        bfloat16 and 8-bit floats have torch's types here; ``[]`` gives their bits, since numpy has no such types. What
        torch cannot hold is left out. It raises if it was named, or if nothing else is left.
        """
        found: dict[str, torch.Tensor] = {}
        refused: dict[str, UnsupportedData] = {}
        columns = [column for columns in self.columns.values() for column in columns]
        for name in names or [*self._open().arrays, *columns]:
            try:
                found[name] = as_tensor(self[name], name, bits_of(self.info, name))
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


# Types that numpy does not have, by safetensors' names: their arrays hold the bits. The reader of torch's files notes
# torch's own names.
_TORCH_NAMES = {
    "BF16": "bfloat16", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip


def torch_name(attributes: Mapping[str, object]) -> str | None:
    """torch's name of the type whose bits an array with these attributes holds; None: its own type."""
    name = attributes.get("torch_dtype") or _TORCH_NAMES.get(str(attributes.get("safetensors_dtype")))
    return str(name) if name else None


def bits_of(entry: Entry, name: str) -> str | None:
    """``torch_name`` of an array of the entry. Of other formats, attributes are what the user wrote."""
    about = entry.arrays.get(name) if entry.format in ("safetensors", "torch") else None
    return None if about is None else torch_name(about.attributes)


def as_tensor(array: Any, name: str, bits: str | None = None) -> torch.Tensor:
    """A tensor on the same memory; UnsupportedData if torch has no such type. ``bits``: of that type of torch's."""
    needed = require("torch", "torch", "data.tensors()", instead=(phrase("use the numpy array"),))
    try:
        with warnings.catch_warnings():
            # Columns of tables, and everything under vm.overcommit_memory=2, are read-only to numpy: torch would
            # warn although it is intended.
            warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
            found = cast("torch.Tensor", needed.from_numpy(array))
            return found if bits is None else found.view(getattr(needed, bits))
    except (TypeError, AttributeError) as problem:  # an older torch lacks some 8-bit floats
        raise UnsupportedData(
            say("{name} cannot be converted to a tensor", name=name),
            why=str(problem).partition(". ")[0],
            fix=(say("use the numpy array"),),
        ) from problem


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"


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
    def __getitem__(self, index: slice | list[Any] | NDArray) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if type(index) is not int:
            if isinstance(index, slice):
                return [self[row] for row in range(*index.indices(self._length))]
            if isinstance(index, list) or getattr(index, "ndim", None):
                return [self[row] for row in self._chosen(index)]
            index = self._number_of(index)
        row = index + self._length if index < 0 else index
        if not 0 <= row < self._length:
            raise IndexError(say("index {index} is out of bounds for {rows} rows", index=index, rows=self._length))
        if self.text:
            try:
                return str(self.copied(row), "utf-8")
            except UnicodeDecodeError as problem:
                raise invalid_text(not_utf8(self.name, row), problem, _read_bytes(self.name, row)) from problem
        return self.values[self._edges[row] : self._edges[row + 1]]

    def _chosen(self, index: Any) -> list[int]:
        """The numbers of the rows that a list or an array selects, as numpy does: by number, or by a mask."""
        chosen = np.asarray(index)
        if chosen.dtype == np.bool_ and chosen.shape == (self._length,):
            chosen = np.flatnonzero(chosen)
        if chosen.ndim != 1 or (chosen.dtype.kind not in "iu" and len(chosen)):
            raise self._not_an_index(f"{chosen.dtype}{list(chosen.shape)}")
        numbers: list[int] = chosen.tolist()
        return numbers

    def _number_of(self, index: Any) -> int:
        """The number of the row at an index that is not a plain int: one of numpy or torch, or one for each axis."""
        try:
            if not isinstance(index, tuple):
                return int(index.__index__())
            at = [int(one.__index__()) for one in index]
        except (AttributeError, TypeError):
            raise self._not_an_index(type(index).__name__) from None
        if len(at) != len(self.shape) or not all(-n <= one < n for one, n in zip(at, self.shape, strict=True)):
            raise IndexError(say("index {index} is out of bounds for shape {shape}", index=index, shape=self.shape))
        return int(np.ravel_multi_index([one % n for one, n in zip(at, self.shape, strict=True)], self.shape))

    def _not_an_index(self, kind: str) -> BadArgumentType:
        return BadArgumentType(
            say("{name!r} cannot be indexed by {kind}", name=self.name, kind=kind),
            why=say(
                "rows are selected by an integer, a slice, a list or flat array of integers, or a mask of all rows"
            ),
            fix=(say("for one row: {code}", code=f"data[{self.name!r}][0]"),),
        )

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


def _read_bytes(name: str, row: int) -> str:
    return say("or read its bytes: {code}", code=f"data[{name!r}].copied({row})")


def _ragged(offsets: NDArray, values: NDArray, text: bool, shape: tuple[int, ...], name: str = "") -> Ragged:
    return Ragged(offsets, values, text=text, shape=shape, name=name)
