"""What every format offers: a description without reading data, and reading into memory that is given.

Covers: the records and the protocol. Does not cover: choosing a format (detect.py) or any format itself.

Arrays leave a reader native-endian and in C order, whatever the file holds. A reader owns its open file and
nothing else: buffers belong to the caller.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol, Self

import numpy as np

Progress = Callable[[int], None]  # told how many bytes have newly arrived


def no_progress(_: int) -> None:
    """A progress nobody looks at."""


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """One array as it will lie in memory."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # native byte order, never object
    attributes: Mapping[str, Any] = field(default_factory=dict)  # JSON can hold them
    # "offsets" and "values" of ragged or string data are two arrays, <name>/offsets and <name>/values;
    # `ragged` is then their common name and `text` says that the values are UTF-8. Row i is
    # values[offsets[i]:offsets[i + 1]]; attributes["ragged_shape"] is there when the rows are not one list.
    ragged: str | None = None
    text: bool = False

    @property
    def nbytes(self) -> int:
        # Not numpy's product: a damaged file may claim a shape that overflows 64 bits.
        return prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class TableSpec:
    """One table, to be stored as an Arrow IPC file."""

    name: str
    rows: int
    columns: Mapping[str, str]  # name → Arrow type as text
    nbytes: int  # at least what the IPC file will take: room is reserved by it
    attributes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Checksum:
    """The CRC-32 that the file's own format gives for an array's bytes and the header right before them."""

    whole: int  # of header and array
    header: int  # of the header alone
    header_bytes: int


@dataclass(frozen=True, slots=True)
class Extent:
    """Where an array lies in a file exactly as it will lie in memory: raw copies and maps may use it.

    Where there is a checksum, whoever reads the bytes must compare it: the format's own library does.
    """

    path: Path
    offset: int
    nbytes: int
    checksum: Checksum | None = None


@dataclass(frozen=True, slots=True)
class Slab:
    """Some consecutive bytes of an array that any thread may decode, beside others."""

    start: int  # in the array's bytes
    nbytes: int
    decode: Callable[[], Iterator[memoryview]]  # the bytes, in order; parts stay as they are while held
    decoding: int = 0  # bytes of memory that decoding it takes at once


@dataclass(frozen=True, slots=True)
class Lookup:
    """One search for a file that another one names; repeated, it must end at the same file."""

    kind: str  # by which rules: "link", "virtual" or "storage" (hdf5_files.py)
    name: str  # as the other file has it
    holder: Path  # that other file
    found: Path | None  # None: it is not there, and once it is the data are others


@dataclass(frozen=True, slots=True)
class Description:
    """A file without its data."""

    format: str
    items: tuple[ArraySpec | TableSpec, ...]
    attributes: Mapping[str, Any]  # the file's own; a group's are under "<group>/<attribute>"
    # Every file whose bytes the data come from, the named one first; a directory stands for all below it.
    files: tuple[Path, ...]
    lookups: tuple[Lookup, ...] = ()  # how those that were not named were found

    @property
    def nbytes(self) -> int:
        return sum(item.nbytes for item in self.items)


class Reader(Protocol):
    """An opened file of some format; used by one thread at a time, it starts threads of its own."""

    def describe(self) -> Description:
        """What is in the file; reads no data (but the lengths of ragged rows)."""
        ...

    def read_into(self, name: str, out: np.ndarray[Any, Any], progress: Progress = no_progress) -> None:
        """Read one whole array into ``out``, which has the spec's shape and dtype and is C-contiguous."""
        ...

    def extent(self, name: str) -> Extent | None:
        """Where the array lies raw, or None where it must be decoded."""
        ...

    def slabs(self, name: str) -> Sequence[Slab] | None:
        """The array as slabs, one after the other from its first byte to its last; None where it comes whole."""
        ...

    def decoding(self, name: str) -> int:
        """Bytes of memory that reading an array, or writing a table, takes beside the result, with one thread at work.

        What is free for it is what the source was opened with (memory.py): more threads where there is more.
        """
        ...

    def write_table(
        self, name: str, path: Path, progress: Progress = no_progress, ask: Progress = no_progress
    ) -> int:
        """Write one table as an Arrow IPC file; returns its bytes. ``ask`` may refuse bytes before they are written."""
        ...

    def descriptors(self) -> Sequence[int]:
        """Of the files, or the directory, that it reads from: they tell whether these are the ones that were meant."""
        ...

    def close(self) -> None:
        """Give the file back; closing twice is fine."""
        ...

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...
