"""HDF5 types as numpy dtypes.

Supports integers, floats, booleans, enumerations, complex numbers, fixed strings, records and arrays of them, in any
byte order, and strings and sequences of variable length as two arrays. Refuses references, opaque bytes, times, and
variable length inside records.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.base_reader import native_dtype
from legroom.formats.fill_arrays import DType
from legroom.messages import say


@dataclass(frozen=True, slots=True)
class StoredType:
    """How a dataset stores its elements, and which dtype they get in memory."""

    dtype: DType  # of one element in memory; for variable length, of one value
    inner: tuple[int, ...]  # axes that belong to the element (HDF5 array types)
    file_dtype: DType | None  # a numpy dtype of the file's bytes, if there is one
    memory_type: Any  # the h5py type to read with
    notes: Mapping[str, Any] = field(default_factory=dict)
    variable: bool = False  # strings or sequences of variable length
    text: bool = False


def stored_type(dataset: Any, name: str, path: Path) -> StoredType:
    """How that dataset is stored; UnsupportedData if it cannot be an array."""
    from h5py import check_string_dtype, check_vlen_dtype, h5t

    kind = dataset.id.get_type()
    try:
        dtype = kind.dtype
    except TypeError as problem:
        raise _unsupported(name, path, str(problem)) from problem
    string = check_string_dtype(dtype)
    if string is not None and string.length is None:
        return StoredType(np.dtype(np.uint8), (), np.dtype(np.uint8), None, variable=True, text=True)
    base = check_vlen_dtype(dtype)
    if base is not None:
        return _sequence(kind, base, name, path)
    _refuse_parts(dtype, name, path)
    element, inner = dtype.subdtype or (dtype, ())
    memory_type = _memory_type(kind, dtype)
    raw = kind == h5t.py_create(dtype, logical=True)
    if not raw:
        try:
            h5t.find(kind, memory_type)
        except (TypeError, ValueError, RuntimeError) as problem:
            raise _unsupported(name, path, say("HDF5 cannot convert its type to a numpy type")) from problem
    notes = {"hdf5_enum": {str(k): int(v) for k, v in names.items()}} if (names := _enum(dtype)) else {}
    return StoredType(native_dtype(element), inner, element if raw else None, memory_type, notes)


def _sequence(kind: Any, base: DType, name: str, path: Path) -> StoredType:
    from h5py import h5t

    if not isinstance(base, np.dtype) or base.hasobject:
        raise _unsupported(name, path, say("its elements are nested sequences of variable length"))
    _refuse_parts(base, name, path)
    if base.subdtype is not None:
        raise _unsupported(name, path, say("its elements are sequences of arrays"))
    raw = kind.get_super() == h5t.py_create(base, logical=True)
    return StoredType(native_dtype(base), (), base if raw else None, None, variable=True)


def _memory_type(kind: Any, dtype: DType) -> Any:
    """The type to request from HDF5: the file's, in native byte order and with numpy's string padding."""
    from h5py import h5t

    if isinstance(kind, h5t.TypeStringID):
        same = kind.copy()
        same.set_strpad(h5t.STR_NULLPAD)
        return same
    if isinstance(kind, h5t.TypeBitfieldID):
        return {1: h5t.NATIVE_B8, 2: h5t.NATIVE_B16, 4: h5t.NATIVE_B32, 8: h5t.NATIVE_B64}[dtype.itemsize]
    return h5t.py_create(dtype.newbyteorder("="), logical=True)


def _enum(dtype: DType) -> Mapping[str, int] | None:
    from h5py import check_enum_dtype

    return check_enum_dtype(dtype)  # type: ignore[no-any-return]


def _refuse_parts(dtype: DType, name: str, path: Path) -> None:
    """Refuse references, opaque bytes and variable length at any depth."""
    from h5py import check_ref_dtype

    if dtype.subdtype is not None:
        _refuse_parts(dtype.subdtype[0], name, path)
    elif dtype.names is not None and dtype.fields is not None:
        for part in dtype.names:
            _refuse_parts(dtype.fields[part][0], name + "." + part, path)
    elif check_ref_dtype(dtype) is not None:
        raise _unsupported(name, path, say("it holds references to other parts of the file"))
    elif dtype.kind == "V":
        raise _unsupported(name, path, say("it holds opaque bytes"))
    elif dtype.hasobject:
        raise _unsupported(name, path, say("it holds fields of variable length"))


def _unsupported(name: str, path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("cannot load {name!r} of {path} as an array", name=name, path=path),
        why=why,
        fix=(say("load only what you need: keys=[…]"),),
    )
