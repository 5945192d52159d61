"""``Data``: what the cache gives.

Covers: names to arrays, tables and ragged rows; tensors; pickling by name; closing.
Does not cover: attaching (attach.py), the torch Dataset (torchset.py), batches (loader).

Arrays keep what they lie on alive by themselves: an array that outlives its Data, or a closed one, stays valid,
and the entry stays leased until the last array is gone.
"""

from __future__ import annotations

import math
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np

from legroom.cache.prefault import Prefault
from legroom.cache.ragged import Ragged
from legroom.errors import UnsupportedData, UsageError
from legroom.formats.protocol import Extent
from legroom.formats.selection import Selection, missing_key
from legroom.model import Entry, Finding
from legroom.words import say

if TYPE_CHECKING:
    import torch

    from legroom.cache.torchset import SharedDataset

NDArray = np.ndarray[Any, Any]


@dataclass(frozen=True, slots=True)
class RaggedParts:
    """The arrays of one ragged dataset."""

    offsets: str
    values: str
    text: bool
    shape: tuple[int, ...] | None = None


@dataclass(slots=True)
class Contents:
    """Everything a Data refers to; dropped as a whole when it is closed."""

    entry: Entry
    arrays: Mapping[str, NDArray]
    tables: Mapping[str, Sequence[Path | bytes]]  # Arrow IPC files, or their bytes: one, or one a shard
    ragged: Mapping[str, RaggedParts]
    extents: Mapping[str, Extent] = field(default_factory=dict)  # where arrays lie in files, if they do
    prefault: Prefault | None = None
    keep: object = None  # the lease, where no array would hold it
    findings: tuple[Finding, ...] = ()


class Data(Mapping[str, Any]):
    """A read-mostly mapping of names to arrays on the shared copy."""

    def __init__(
        self,
        contents: Contents,
        keys: tuple[str, ...] | None,
        again: tuple[Callable[..., Data], tuple[Any, ...]],
    ) -> None:
        self._contents: Contents | None = contents
        self._again = again
        self._names = _names(contents, keys)

    # The mapping.

    def __getitem__(self, name: str) -> Any:
        contents = self._open()
        if name in contents.ragged:
            parts = contents.ragged[name]
            arrays = contents.arrays
            return Ragged(arrays[parts.offsets], arrays[parts.values], text=parts.text, shape=parts.shape)
        if name in contents.arrays:
            return contents.arrays[name]
        if name in contents.tables:
            return table_of(contents.tables[name])
        column = self._column(contents, name)
        if column is not None:
            return column
        raise missing_key(name, self._names, "the data")

    def __iter__(self) -> Iterator[str]:
        self._open()
        return iter(self._names)

    def __len__(self) -> int:
        self._open()
        return len(self._names)

    # What else is asked of it.

    @property
    def info(self) -> Entry:
        """What this is, where it lies, what it was built from."""
        return self._open().entry

    @property
    def attributes(self) -> Mapping[str, object]:
        """The attributes of the source file."""
        return self._open().entry.attributes

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What was passed over on the way here."""
        return self._open().findings

    def where(self, name: str) -> Extent | None:
        """In which file an array lies, and where in it; None where it lies in no file."""
        return self._open().extents.get(name)

    def tensors(self, *names: str) -> dict[str, torch.Tensor]:
        """The arrays as torch tensors on the same memory; those torch cannot hold only raise if they are named."""
        import torch

        contents = self._open()
        found: dict[str, torch.Tensor] = {}
        for name in names or contents.arrays:
            array = self[name] if names else contents.arrays[name]
            try:
                with warnings.catch_warnings():
                    # Read-only under vm.overcommit_memory=2: torch would warn, and cannot know that it is meant.
                    warnings.filterwarnings("ignore", message="The given NumPy array is not writ")
                    found[name] = torch.from_numpy(array)
            except TypeError as problem:
                if names:
                    raise UnsupportedData(
                        say("{name} cannot be a tensor", name=name),
                        why=str(problem).partition(". ")[0],
                        fix=(say("use the numpy array itself"),),
                    ) from problem
        return found

    def dataset(self, *names: str, transform: Callable[..., Any] | None = None) -> SharedDataset:
        """A torch map-style Dataset of these arrays' rows; ``transform`` gets the row of each as arguments."""
        from legroom.cache.torchset import shared_dataset

        return shared_dataset(
            self, names or tuple(name for name in self if name not in self._open().tables), transform
        )

    def ready(self, timeout: float | None = None) -> bool:
        """Wait until every page is mapped, so that the first epoch is as fast as the second."""
        prefault = self._open().prefault
        return True if prefault is None else prefault.wait(timeout)

    def close(self) -> None:
        """Let go of everything; arrays that somebody still holds stay valid. A second time does nothing."""
        self._contents = None

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

    def _open(self) -> Contents:
        if self._contents is None:
            raise UsageError(
                say("the data are closed"), why=say("close() was called"), fix=(say("open them again"),)
            )
        return self._contents

    def _column(self, contents: Contents, name: str) -> NDArray | None:
        """A fixed-width column without nulls, as an array: ``table/column``, or ``column`` of the only table."""
        for table, path in contents.tables.items():
            column = name.removeprefix(table + "/") if name.startswith(table + "/") else name
            if (column == name and len(contents.tables) > 1) or column not in contents.entry.tables[
                table
            ].columns:
                continue
            return _column_array(table_of(path).column(column), name)
        return None


def ragged_of(arrays: Sequence[Any]) -> Mapping[str, RaggedParts]:
    """The ragged datasets among arrays that say which one they belong to."""
    found: dict[str, RaggedParts] = {}
    for array in arrays:
        if array.ragged is not None and array.name == f"{array.ragged}/offsets":
            shape = array.attributes.get("ragged_shape")
            rows = tuple(shape) if shape is not None and math.prod(shape) == array.shape[0] - 1 else None
            text = any(other.text for other in arrays if other.ragged == array.ragged)
            found[array.ragged] = RaggedParts(array.name, f"{array.ragged}/values", text, rows)
    return found


def _names(contents: Contents, keys: tuple[str, ...] | None) -> tuple[str, ...]:
    parts = {part for ragged in contents.ragged.values() for part in (ragged.offsets, ragged.values)}
    names = [name for name in contents.arrays if name not in parts]
    every = [*names, *contents.ragged, *contents.tables]
    selection = Selection(keys)
    return tuple(name for name in every if selection.takes(name))


def table_of(parts: Sequence[Path | bytes]) -> Any:
    """The table of an Arrow IPC file (mapped, not read) or of its bytes; shards are joined without copying."""
    import pyarrow as pa

    tables = []
    for part in parts:
        if isinstance(part, bytes):
            tables.append(pa.ipc.open_file(pa.BufferReader(part)).read_all())
            continue
        with pa.memory_map(os.fspath(part)) as file:
            tables.append(pa.ipc.open_file(file).read_all())
    return tables[0] if len(tables) == 1 else pa.concat_tables(tables)


def _column_array(column: Any, name: str) -> NDArray:
    import pyarrow as pa

    kind = column.type
    fixed = pa.types.is_primitive(kind) and not pa.types.is_boolean(kind)
    if not fixed or column.null_count:
        raise UnsupportedData(
            say("column {name} cannot be an array", name=name),
            why=say("it is {kind} with {nulls} nulls", kind=kind, nulls=column.null_count),
            fix=(say("use the table itself"),),
        )
    # One chunk is a view on the map; several are joined, which copies.
    chunk = column.chunk(0) if column.num_chunks == 1 else column.combine_chunks()
    array: NDArray = chunk.to_numpy(zero_copy_only=False)
    return array


def _shown(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, np.ndarray) else f"{type(value).__name__}"
