"""Attributes of files as JSON can hold them.

Covers: numpy scalars and arrays, bytes, and what has no JSON form (described in words). Does not cover:
reading them, or storing them.

A large array is described, not copied: manifests are small files. Numbers that JSON lacks (nan, infinity)
become the strings that ``float()`` reads back.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import isfinite
from typing import Any

import numpy as np

MOST_ELEMENTS = 1024
_MOST_TEXT = 1 << 20


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
