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

from legroom.errors import UnsupportedData, UsageError
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

_MOST_BYTES = 1 << 50  # what a manifest may say
_MOST_AXES = 32  # of numpy 1
MOST_ELEMENTS = 1024
_MOST_TEXT = 1 << 20


class BaseReader:
    """An opened file; what it holds is looked up once."""

    memory: DecodingMemory = UNLIMITED  # what decoding may take; set by whoever opens the source
    _counts_itself = False  # takes memory piece by piece where it decodes, not here for the whole read

    def __init__(self, path: Path, selection: Selection) -> None:
        self.path = path
        self.selection = selection
        self._description: Description | None = None
        self._by_name: dict[str, ArraySpec | TableSpec] | None = None
        self._closed = False

    # What a format brings.

    def _look(self) -> Description:
        raise NotImplementedError

    def _read(self, spec: ArraySpec, out: np.ndarray[Any, Any], progress: Progress) -> None:
        raise NotImplementedError

    def _extent(self, spec: ArraySpec) -> Extent | None:
        raise NotImplementedError

    def _slabs(self, spec: ArraySpec) -> Sequence[Slab] | None:
        return None

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        """Two pieces: one as it comes from the file, one converted (fill.py)."""
        return 2 * PIECE if isinstance(spec, TableSpec) or self._extent(spec) is None else 0

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        raise NotImplementedError

    def _close(self) -> None:
        raise NotImplementedError

    def _library_errors(self, doing: str) -> AbstractContextManager[None]:
        """Turn what the format's library raises for a damaged file into one error.

        Every call that reads no data runs in it: h5py converts types and pyarrow parses schemas in attributes
        that look harmless, so a guard around single calls always misses one.
        """
        return nullcontext()

    # The protocol.

    def describe(self) -> Description:
        """What is in the file; reads no data (but the lengths of ragged rows)."""
        self._require_open()
        if self._description is None:
            with self._library_errors(say("its contents")):
                found = self._look()
            for item in found.items:
                if isinstance(item, ArraySpec):
                    self._require_possible(item)
            self._description = found
        return self._description

    def read_into(self, name: str, out: np.ndarray[Any, Any], progress: Progress = no_progress) -> None:
        """Read one whole array into ``out``, which has the spec's shape and dtype and is C-contiguous."""
        spec = self._array(name)
        check_out(spec, out)
        with self._taken(spec):
            self._read(spec, out, progress)

    def extent(self, name: str) -> Extent | None:
        """Where the array lies raw, or None where it must be decoded."""
        spec = self._array(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._extent(spec)

    def slabs(self, name: str) -> Sequence[Slab] | None:
        """The array as slabs, one after the other from its first byte to its last; None where it comes whole."""
        spec = self._array(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._slabs(spec)

    def write_table(
        self, name: str, path: Path, progress: Progress = no_progress, ask: Progress = no_progress
    ) -> int:
        """Write one table as an Arrow IPC file; returns its bytes. ``ask`` may refuse bytes before they are written."""
        spec = self._item(name)
        if not isinstance(spec, TableSpec):
            raise UsageError(
                say("{name!r} of {path} is an array, not a table", name=name, path=self.path),
                fix=(say("use read_into for arrays"),),
            )
        with self._taken(spec):
            return self._write(spec, path, progress, ask)

    def decoding(self, name: str) -> int:
        """Bytes of memory that reading it takes beside the result, with one thread at work."""
        spec = self._item(name)
        with self._library_errors(say("{name!r}", name=name)):
            return self._decoding(spec)

    def _taken(self, spec: ArraySpec | TableSpec) -> AbstractContextManager[None]:
        if self._counts_itself:
            return nullcontext()
        return self.memory.take(self.decoding(spec.name), self._called(spec))

    def _called(self, spec: ArraySpec | TableSpec) -> str:
        return say("{name!r} of {path}", name=spec.name, path=self.path)

    def descriptors(self) -> Sequence[int]:
        """Of the files, or the directory, that it reads from: they tell whether these are the ones that were meant."""
        raise NotImplementedError

    def close(self) -> None:
        """Give the file back; closing twice is fine."""
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
            raise UsageError(
                say("{name!r} of {path} is a table, not an array", name=name, path=self.path),
                fix=(say("use write_table for tables"),),
            )
        return spec

    def _item(self, name: str) -> ArraySpec | TableSpec:
        items = self.describe().items
        if self._by_name is None:
            self._by_name = {item.name: item for item in items}
        if name not in self._by_name:
            raise missing_key(name, self._by_name, self.path)
        return self._by_name[name]

    def _require_possible(self, spec: ArraySpec) -> None:
        """Refuse a shape that numpy has no array for; one without elements may still have impossible lengths."""
        most = prod(length for length in spec.shape if length) * max(1, spec.dtype.itemsize)
        if most > _MOST_BYTES or len(spec.shape) > _MOST_AXES:
            raise UnsupportedData(
                say("{name!r} of {path} has a shape that no array can have", name=spec.name, path=self.path),
                why=say("its shape is {shape}", shape=spec.shape),
                fix=(say("check the file, or leave it out: name the arrays you need with keys=[…]"),),
            )

    def _require_open(self) -> None:
        if self._closed:
            raise UsageError(
                say("{path} was closed", path=self.path), fix=(say("open it again with open_source(path)"),)
            )


def as_json(value: object) -> Any:
    """The value as JSON can hold it."""
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
