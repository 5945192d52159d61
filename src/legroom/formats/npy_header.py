"""The header of the .npy format, versions 1 to 3.

Covers: parsing it from bytes, strictly. Does not cover: the data after it, or npz (npz.py).

The header is a Python literal. It is read with ``ast.literal_eval`` under a bound on its length, and type
strings are matched against those numpy writes before numpy sees them: nothing in a file can name an object
type or make numpy evaluate anything.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.formats.source import damaged
from legroom.words import say

MAGIC = b"\x93NUMPY"
_MOST_HEADER = 1 << 18
_TYPE = re.compile(r"[<>|=]?(?:[?bBhHiIlLqQefdgFDG]|[biufcSUV][0-9]{1,9}|[Mm]8(?:\[[0-9A-Za-zμ/]{0,20}\])?)")


@dataclass(frozen=True, slots=True)
class NpyHeader:
    """What a .npy file says of its array."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # as in the file
    fortran: bool
    size: int  # bytes before the data


def read_header(read: Callable[[int, int], bytes], path: Path, name: str) -> NpyHeader:
    """Parse the header; ``read(offset, count)`` gives exactly the bytes asked for, or raises."""
    lead = read(0, 8)
    if lead[:6] != MAGIC:
        raise damaged(path, say("{name!r} does not begin like a .npy array", name=name))
    version = lead[6]
    if version not in (1, 2, 3) or lead[7] != 0:
        raise damaged(path, say("{name!r}: no .npy version {a}.{b} exists", name=name, a=version, b=lead[7]))
    width = 2 if version == 1 else 4
    length = int.from_bytes(read(8, width), "little")
    if length > _MOST_HEADER:
        raise damaged(path, say("{name!r}: a header of {length} bytes", name=name, length=length))
    text = read(8 + width, length)
    try:
        shape, dtype, fortran = _parse(text.decode("utf-8" if version == 3 else "latin-1"))
    except _Objects:
        raise UnsupportedData(
            say("{name!r} of {path} holds Python objects", name=name, path=path),
            why=say("they are stored as a pickle, and a pickle runs code when it is read"),
            fix=(
                say(
                    "save it as numbers, fixed-length strings or records: numpy.save(..., allow_pickle=False)"
                ),
            ),
        ) from None
    except Exception as problem:  # literal_eval also raises MemoryError, RecursionError and SystemError
        raise damaged(path, say("the header of {name!r}: {problem}", name=name, problem=problem)) from problem
    return NpyHeader(shape, dtype, fortran, 8 + width + length)


class _Objects(Exception):
    """The type is, or has, a Python object."""


def _parse(text: str) -> tuple[tuple[int, ...], np.dtype[Any], bool]:
    header = ast.literal_eval(text.strip())
    if not isinstance(header, dict) or set(header) != {"descr", "fortran_order", "shape"}:
        raise ValueError(say("it is not a dictionary of descr, fortran_order and shape"))
    shape, fortran = header["shape"], header["fortran_order"]
    if not isinstance(shape, tuple) or not all(type(n) is int and 0 <= n <= sys.maxsize for n in shape):
        raise ValueError(say("shape is not a tuple of lengths"))
    if len(shape) > 32:
        raise ValueError(say("{count} dimensions", count=len(shape)))
    if not isinstance(fortran, bool):
        raise ValueError(say("fortran_order is neither True nor False"))
    _check_type(header["descr"])
    dtype = np.lib.format.descr_to_dtype(header["descr"])
    if dtype.hasobject:
        raise _Objects
    return shape, dtype, fortran


def _check_type(descr: object, depth: int = 0) -> None:
    """Let only what numpy itself writes through to numpy."""
    if depth > 32:
        raise ValueError(say("types nested too deeply"))
    if isinstance(descr, str):
        if descr.lstrip("<>|=").startswith("O"):
            raise _Objects
        if not _TYPE.fullmatch(descr):
            raise ValueError(say("{descr!r} is no type", descr=descr))
    elif isinstance(descr, list):
        for field in descr:
            if not isinstance(field, tuple) or len(field) not in (2, 3):
                raise ValueError(say("a field is not (name, type) or (name, type, shape)"))
            _check_type(field[1], depth + 1)
    elif isinstance(descr, tuple) and len(descr) == 2:
        _check_type(descr[0], depth + 1)
    else:
        raise ValueError(say("{descr!r} is no type", descr=descr))
