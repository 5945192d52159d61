"""Base class of all readers: lookup by name, argument checks, memory accounting, closing, attributes as JSON.

To add a format, subclass BaseReader, implement the methods under "Implemented by each format", and register the class
in detect.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import isfinite, prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.buffers import PIECE, check_out
from legroom.formats.decoding_memory import UNLIMITED, DecodingMemory
from legroom.formats.protocol import (
    ArraySpec,
    Description,
    Extent,
    Progress,
    Slab,
    TableSpec,
    no_progress,
)
from legroom.formats.selection import Selection, missing_key
from legroom.words import say

_MOST_BYTES = 1 << 50  # the limit of a manifest
_MOST_AXES = 32  # numpy 1's limit
MOST_ELEMENTS = 1024
_MOST_TEXT = 1 << 20


class BaseReader:
    """An opened file, described once."""

    memory: DecodingMemory = UNLIMITED  # what decoding may take; set by open_source()
    _accounts_memory = (
        False  # True: the subclass takes memory from ``self.memory`` piece by piece as it decodes
    )

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path = path
        self.selection = selection
        self._description: Description | None = None
        self._by_name: dict[str, ArraySpec | TableSpec] | None = None
        self._closed = False

    # Implemented by each format.

    def _describe(self) -> Description:
        raise NotImplementedError

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        raise NotImplementedError

    def _extent(self, spec: ArraySpec) -> Extent | None:
        raise NotImplementedError

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        return None

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """Two pieces by default: one as stored in the file, one converted (buffers.py)."""
        return 2 * PIECE if isinstance(spec, TableSpec) or self._extent(spec) is None else 0

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _library_errors(self, doing: str) -> AbstractContextManager[None]:
        """Translate what the format's library raises for a damaged file into a SourceError.

        Every call that reads no data runs inside it. h5py converts types and pyarrow parses schemas in attributes that
        look harmless, so wrapping single calls would miss some.
        """
        return nullcontext()

    # The Reader protocol.

    def describe(self) -> Description:
        """Describe the file. Reads no data except the lengths of ragged rows."""
        self._require_open()
        if self._description is None:
            with self._library_errors(say("its contents")):
                found = self._describe()
            for item in found.items:
                if isinstance(item, ArraySpec):
                    self._require_possible(item)
            self._description = found
        return self._description

    def read_into(self, name: str, out: np.ndarray[Any, Any], progress: Progress = no_progress) -> None:
        """Read one whole array into ``out``, which has the spec's shape and dtype and is C-contiguous."""
        spec = self._array(name)
        check_out(spec, out)
        with self._reserve(spec):
            self._read(spec, out, progress)

    def extent(self, name: str) -> Extent | None:
        """Where the array's raw bytes are in a file, or None if it must be decoded."""
        spec = self._array(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._extent(spec)

    def slabs(self, name: str) -> Sequence[Slab] | None:
        """The array as consecutive slabs from its first byte to its last, or None if it can only be read whole."""
        spec = self._array(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._slabs(spec)

    def write_table(
        self, name: str, path: Path, progress: Progress = no_progress, ask: Progress = no_progress
    ) -> int:
        """Write one table as an Arrow IPC file and return its size; ``ask`` may refuse bytes beforehand."""
        spec = self._item(name)
        if not isinstance(spec, TableSpec):
            raise TypeError(f"{name!r} of {self.path} is an array, not a table: use read_into")
        with self._reserve(spec):
            return self._write(spec, path, progress, ask)

    def decoding(self, name: str) -> int:
        """Bytes of memory that reading it needs besides the result, with one thread."""
        spec = self._item(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._decoding(spec)

    def _reserve(self, spec: ArraySpec | TableSpec) -> AbstractContextManager[None]:
        if self._accounts_memory:
            return nullcontext()
        return self.memory.take(self.decoding(spec.name), self._label(spec))

    def _label(self, spec: ArraySpec | TableSpec) -> str:
        return say("{name!r} of {path}", name=spec.name, path=self.path)

    def descriptors(self) -> Sequence[int]:
        """File descriptors of the files, or the directory, being read."""
        raise NotImplementedError

    def close(self) -> None:
        """Close the file. Closing twice is allowed."""
        if not self._closed:
            self._closed = True
            self._close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _array(self, name: str) -> ArraySpec:
        spec = self._item(name)
        if not isinstance(spec, ArraySpec):
            raise TypeError(f"{name!r} of {self.path} is a table, not an array: use write_table")
        return spec

    def _item(self, name: str) -> ArraySpec | TableSpec:
        items = self.describe().items
        if self._by_name is None:
            self._by_name = {item.name: item for item in items}
        if name not in self._by_name:
            raise missing_key(name, self._by_name, self.path)
        return self._by_name[name]

    def _require_possible(self, spec: ArraySpec) -> None:
        """Refuse a shape that numpy cannot represent; an array without elements may still have impossible lengths."""
        most = prod(length for length in spec.shape if length) * max(1, spec.dtype.itemsize)
        if most > _MOST_BYTES or len(spec.shape) > _MOST_AXES:
            raise UnsupportedData(
                say("{name!r} of {path} is too large for a numpy array", name=spec.name, path=self.path),
                why=say("its shape is {shape}", shape=spec.shape),
                fix=(say("check the file, or leave it out: name the arrays you need with keys=[…]"),),
            )

    def _require_open(self) -> None:
        if self._closed:
            raise ValueError(f"{self.path} was closed")


def as_json(value: object) -> Any:
    """Convert an attribute to a value that JSON can store.

    Manifests are small files, so a large array is described instead of copied. Numbers that JSON lacks (nan, infinity)
    become the strings that ``float()`` accepts.
    """
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, str):
        return value if len(value) <= _MOST_TEXT else {"omitted": "text", "length": len(value)}
    if isinstance(value, float):
        return value if isfinite(value) else str(value)
    if isinstance(value, complex):
        return [as_json(value.real), as_json(value.imag)]
    if isinstance(value, (bytes, bytearray)):
        return as_json(bytes(value).decode("utf-8", "replace"))
    if isinstance(value, np.generic):
        return _scalar(value)
    if isinstance(value, np.ndarray):
        return _array(value)
    if isinstance(value, Mapping):
        return {str(key): as_json(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [as_json(item) for item in value]
    return {"omitted": type(value).__name__}


def _scalar(value: np.generic) -> Any:
    if isinstance(value, np.void) and value.dtype.names:
        return {name: as_json(value[name]) for name in value.dtype.names}
    if isinstance(value, (np.datetime64, np.timedelta64)):
        return str(value)
    if isinstance(value, np.longdouble):
        return as_json(float(value))
    plain = value.item()
    return {"omitted": type(value).__name__} if isinstance(plain, np.generic) else as_json(plain)


def _array(value: np.ndarray[Any, Any]) -> Any:
    if value.size > MOST_ELEMENTS:
        return {"omitted": "array", "shape": list(value.shape), "dtype": str(value.dtype)}
    if value.ndim == 0:
        return as_json(value[()])
    return [_array(row) if isinstance(row, np.ndarray) else as_json(row) for row in value]
