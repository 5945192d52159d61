"""The Reader protocol: describe a file without loading it, then read arrays into memory that the caller gives.

This is the interface between file formats and the rest of Legroom. BaseReader (base_reader.py) implements what does not
depend on the format; a format of your own can subclass it, or implement Reader directly.

Rules for every reader:
- Arrays are native-endian and in C order, whatever the file holds.
- A reader owns its open files and nothing else. Buffers belong to the caller.
- One thread at a time uses a reader. It may start threads of its own, which end before the call returns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

Progress = Callable[[int], None]  # called with the number of bytes that arrived since the last call


def no_progress(_: int) -> None:
    """Ignore progress."""


# What a file holds: the result of Reader.describe().


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as it will be in memory.

    Ragged data (strings, sequences of variable length) are two arrays, ``<name>/offsets`` and ``<name>/values``. Row i
    is ``values[offsets[i]:offsets[i + 1]]``. If the rows are not a flat list, ``attributes["ragged_shape"]`` is their
    shape.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # native byte order, never object
    attributes: Mapping[str, Any] = field(default_factory=dict)  # can be stored as JSON
    ragged: str | None = None  # the common name of offsets and values
    text: bool = False  # the values of ragged data are UTF-8

    @property
    def nbytes(self) -> int:
        # Not numpy's product: a damaged file may claim a shape that overflows 64 bits.
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table, to be written as an Arrow IPC file."""

    name: str
    rows: int
    columns: Mapping[str, str]  # column name → Arrow type as text
    nbytes: int  # upper bound of the IPC file's size: space is reserved by it
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Lookup:
    """One search for a file that another file refers to. Repeating it must find the same file, or the data changed."""

    kind: str  # which search rules apply: "link", "virtual" or "storage" (hdf5_external.py)
    name: str  # as written in the referring file
    holder: Path  # the referring file
    found: Path | None  # None: missing; if it appears later, the data change


@dataclass(frozen=True, slots=True)
class Description:
    """What a file holds, without the data."""

    format: str
    items: tuple[ArraySpec | TableSpec, ...]
    attributes: Mapping[str, Any]  # of the file; those of a group are under "<group>/<attribute>"
    # Every file that the data come from, the opened one first. A directory stands for everything below it.
    files: tuple[Path, ...]
    lookups: tuple[Lookup, ...] = ()  # how the further files were found

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


# How an array can be read faster than through Reader.read_into().


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 that the file stores for an array's bytes and the header directly before them."""

    whole: int  # of header and array
    header: int  # of the header alone
    header_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where a file holds an array's bytes exactly as they will be in memory, so that they can be copied or mapped.

    A caller that reads the bytes must verify the checksum where there is one, as the format's own library does.
    """

    path: Path
    offset: int
    nbytes: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """Consecutive bytes of an array that any thread can decode, in parallel with other slabs."""

    start: int  # in the array's bytes
    nbytes: int
    decode: Callable[[], Iterator[memoryview]]  # yields the bytes in order; parts stay valid while referenced
    decoding: int = 0  # bytes of memory that decoding it needs at once


class Reader(Protocol):
    """An opened data file."""

    def describe(self) -> Description:
        """Describe the file. Reads no data except the lengths of ragged rows."""
        ...

    def read_into(self, name: str, out: np.ndarray[Any, Any], progress: Progress = no_progress) -> None:
        """Read one whole array into ``out``, which has the spec's shape and dtype and is C-contiguous."""
        ...

    def extent(self, name: str) -> Extent | None:
        """Where the array's raw bytes are in a file, or None if it must be decoded."""
        ...

    def slabs(self, name: str) -> Sequence[Slab] | None:
        """The array as consecutive slabs from its first byte to its last, or None if it can only be read whole."""
        ...

    def decoding(self, name: str) -> int:
        """Bytes of memory that reading an array, or writing a table, needs besides the result, with one thread.

        The limit is the DecodingMemory that the file was opened with: more threads decode where more memory is free.
        """
        ...

    def write_table(
        self, name: str, path: Path, progress: Progress = no_progress, ask: Progress = no_progress
    ) -> int:
        """Write one table as an Arrow IPC file and return its size.

        ``ask`` is called with a number of bytes before they are written, and may raise to refuse them.
        """
        ...

    def descriptors(self) -> Sequence[int]:
        """File descriptors of the files, or the directory, being read; callers check that no file was replaced."""
        ...

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
