"""The header of the .npy files in an entry, made one way only.

Covers: writing the header, and the dtypes that may stand in one. Does not cover: data, or .npy files of
other people's (formats).

The header is a function of shape and dtype, so a reader compares bytes instead of parsing a file it has no
reason to trust. Any program that reads .npy reads it: version 1.0 where it fits, padded to 64 bytes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import numpy as np

from legroom.words import say

ALIGNMENT = 64
_SIMPLE = re.compile(r"[<>|=]?(?:[biufcmMSUV?])[0-9]*(?:\[[0-9]*[a-zA-Zμ]+\])?")

Dtype = np.dtype[Any]


@lru_cache(maxsize=4096)
def header(shape: tuple[int, ...], dtype: Dtype) -> bytes:
    """The bytes before the data."""
    descr = np.lib.format.dtype_to_descr(dtype)
    text = f"{{'descr': {descr!r}, 'fortran_order': False, 'shape': {tuple(map(int, shape))!r}, }}"
    try:
        body, major, width = text.encode("latin-1"), 1, 2
    except UnicodeEncodeError:  # field names of a structured dtype: version 3.0 is UTF-8
        body, major, width = text.encode("utf-8"), 3, 4
    if major == 1 and len(body) > 65000:
        major, width = 2, 4
    start = 8 + width
    padded = -(-(start + len(body) + 1) // ALIGNMENT) * ALIGNMENT
    body = body.ljust(padded - start - 1) + b"\n"
    return b"\x93NUMPY" + bytes((major, 0)) + len(body).to_bytes(width, "little") + body


def dtype_to_json(dtype: Dtype) -> Any:
    """The dtype as JSON can hold it."""
    return np.lib.format.dtype_to_descr(dtype)


@lru_cache(maxsize=1024)
def can_be_stored(dtype: Dtype) -> bool:
    """Whether a .npy header and a manifest say exactly this dtype."""
    try:
        return dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype)))) == dtype
    except ValueError:  # numpy has no word for fields that overlap or are out of order
        return False


def dtype_from_json(value: Any) -> Dtype:
    """The dtype again; ValueError for anything that is not a plain dtype in native byte order."""
    if isinstance(value, str):
        return _simple(value)
    return _checked(value, _record)


@lru_cache(maxsize=1024)
def _simple(value: str) -> Dtype:
    return _checked(value, lambda text: np.dtype(_plain(text)))


def _checked(value: Any, make: Callable[[Any], Dtype]) -> Dtype:
    try:
        dtype = make(value)
    except (TypeError, ValueError, SyntaxError, OverflowError, MemoryError) as problem:
        raise ValueError(say("{value!r} is no dtype", value=value)) from problem
    if dtype.hasobject or not dtype.isnative:
        raise ValueError(say("{value!r} is not a native dtype without objects", value=value))
    return dtype


def _plain(value: str) -> str:
    if len(value) > 64 or not _SIMPLE.fullmatch(value):
        raise ValueError(say("{value!r} is no dtype", value=value))
    return value


def _record(value: Any, depth: int = 0) -> Dtype:
    """A structured dtype of its fields, [name, dtype] or [name, dtype, shape] each.

    Padding, which aligned C structures have, is a field of bytes without a name: numpy would give it one.
    """
    if not isinstance(value, list) or not value or depth > 8:
        raise ValueError(say("no list of fields"))
    names: list[str] = []
    formats: list[Dtype] = []
    offsets: list[int] = []
    offset = 0
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
            raise ValueError(say("no field"))
        name, kind, *rest = entry
        base = np.dtype(_plain(kind)) if isinstance(kind, str) else _record(kind, depth + 1)
        dtype = np.dtype((base, _shape(rest[0]))) if rest else base
        if name or dtype.kind != "V" or dtype.names is not None or rest:
            names.append(name)
            formats.append(dtype)
            offsets.append(offset)
        offset += dtype.itemsize
    return np.dtype({"names": names, "formats": formats, "offsets": offsets, "itemsize": offset})


def _shape(value: Any) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not all(type(n) is int and n >= 0 for n in value):
        raise ValueError(say("no shape of a field"))
    return tuple(value)
