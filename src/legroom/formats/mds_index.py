"""``index.json`` of a MosaicML MDS directory: its shards and columns, with every field checked.

A column's encoding says how its bytes are read: numbers of a fixed size, text, or bytes of any length. Nothing here
decodes pickles or images.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

from legroom.errors import DamagedSource, UnsupportedData
from legroom.formats.file_reads_and_errors import damaged
from legroom.formats.fill_arrays import DType
from legroom.messages import say

INDEX = "index.json"
MOST_SHARD = 1 << 32  # bytes: positions in a shard have 32 bits
MOST_INDEX = 256 << 20
_VERSION = 2
_NUMBERS = ("uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64", "float16", "float32", "float64")
_BYTES = (
    "bytes", "str_int", "str_float", "str_decimal", "pil", "jpeg", "jpeg_array", "jpegarray", "png",
    "list[pil]", "list[jpeg]", "list[png]", "pkl", "json", "ndarray",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Column:
    """One column: fixed-size numbers, or bytes of any length."""

    name: str
    encoding: str
    dtype: DType | None = None  # None: bytes of any length
    shape: tuple[int, ...] = ()

    @property
    def size(self) -> int | None:
        """Bytes of each value; None: stored with each."""
        return None if self.dtype is None else prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class ShardFile:
    """One file of a shard, as the index describes it."""

    name: str
    nbytes: int
    hashes: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class MdsShard:
    """A shard: the file with its samples, and its compressed form if there is one."""

    samples: int
    raw: ShardFile
    compressed: ShardFile | None
    compression: str | None  # the algorithm, without its level


def parse_index(path: Path, text: bytes) -> tuple[list[Column], list[MdsShard]]:
    """The columns, the same in every shard, and the shards."""
    try:
        index = json.loads(text)
    except (ValueError, RecursionError) as problem:
        raise damaged(path, say("it is not JSON: {problem}", problem=problem)) from problem
    shards = index.get("shards") if isinstance(index, dict) else None
    if not isinstance(shards, list) or not shards:
        raise _not_an_index(path, say("it has no list of shards"))
    first: list[Column] | None = None
    found = []
    for number, one in enumerate(shards):
        if not isinstance(one, dict) or one.get("format") != "mds" or one.get("version") != _VERSION:
            raise _not_an_index(path, say("shard {number} is not MDS version 2", number=number))
        columns = _columns(path, number, one)
        first = first or columns
        if columns != first:
            raise UnsupportedData(
                say("the shards of {path} have different columns", path=path),
                why=say("shard {number} and shard 0 differ", number=number),
                fix=(say("write shards of the same columns into one directory"),),
            )
        found.append(_shard(path, number, one))
    assert first is not None
    return first, found


def _columns(path: Path, number: int, shard: dict[str, Any]) -> list[Column]:
    names, encodings, sizes = (shard.get(f"column_{part}") for part in ("names", "encodings", "sizes"))
    lists = [part for part in (names, encodings, sizes) if isinstance(part, list)]
    if len(lists) != 3 or len({len(part) for part in lists}) != 1 or not lists[0]:
        raise _invalid(path, number, "column_names")
    if not all(isinstance(text, str) and text for text in (*lists[0], *lists[1])) or len(set(lists[0])) < len(lists[0]):
        raise _invalid(path, number, "column_names")
    columns = []
    for name, encoding, size in zip(*lists, strict=True):
        column = _column(path, name, encoding)
        if size != column.size or type(size) is bool:
            raise damaged(
                path,
                say(
                    "column {name!r} of shard {number} has size {size}, but its encoding {encoding!r} has {own}",
                    name=name, number=number, size=size, encoding=encoding, own=column.size,
                ),
            )  # fmt: skip
        columns.append(column)
    return columns


def _column(path: Path, name: str, encoding: str) -> Column:
    if encoding == "int":
        return Column(name, encoding, np.dtype(np.int64))
    if encoding in _NUMBERS:
        return Column(name, encoding, np.dtype(encoding))
    if encoding in _BYTES or encoding == "str":
        return Column(name, encoding)
    kind, _, rest = encoding.partition(":")
    dtype, _, shape = rest.partition(":")
    lengths = shape.split(",") if shape else []
    if kind != "ndarray" or dtype not in _NUMBERS or not all(one.isdigit() and len(one) < 16 for one in lengths):
        raise UnsupportedData(
            say("column {name!r} of {path} cannot be read", name=name, path=path),
            why=say("its encoding {encoding!r} is unknown", encoding=encoding),
            fix=(say("write the column with one of MDS's own encodings"),),
        )
    if not lengths:
        return Column(name, encoding)  # each value with its own shape in front of its bytes
    if 0 in (axes := tuple(map(int, lengths))):
        raise damaged(path, say("the shape of column {name!r} is {shape}", name=name, shape=axes))
    return Column(name, encoding, np.dtype(dtype), axes)


def _shard(path: Path, number: int, shard: dict[str, Any]) -> MdsShard:
    samples, compression = shard.get("samples"), shard.get("compression")
    if type(samples) is not int or not 0 <= samples < MOST_SHARD or not isinstance(compression, (str, type(None))):
        raise _invalid(path, number, "samples")
    raw = _file(path, number, shard.get("raw_data"))
    if raw is None or raw.nbytes >= MOST_SHARD:
        raise _invalid(path, number, "raw_data")
    compressed = _file(path, number, shard.get("zip_data"))
    algorithm = compression.partition(":")[0] if compression else None
    return MdsShard(samples, raw, compressed if algorithm else None, algorithm)


def _file(path: Path, number: int, given: Any) -> ShardFile | None:
    if given is None:
        return None
    fields: dict[str, Any] = given if isinstance(given, dict) else {}
    name, nbytes, hashes = fields.get("basename"), fields.get("bytes"), fields.get("hashes") or {}
    if not isinstance(name, str) or {"", ".", ".."} & set(name.split("/")) or not name.isprintable():
        raise _invalid(path, number, "basename")
    if type(nbytes) is not int or nbytes < 0:
        raise _invalid(path, number, "bytes")
    if not isinstance(hashes, dict) or not all(isinstance(text, str) for text in hashes.values()):
        raise _invalid(path, number, "hashes")
    return ShardFile(name, nbytes, hashes)


def _invalid(path: Path, number: int, key: str) -> DamagedSource:
    return damaged(path, say("{key} of shard {number} is invalid", key=repr(key), number=number))


def _not_an_index(path: Path, why: str) -> UnsupportedData:
    return UnsupportedData(
        say("{path} is not the index of an MDS dataset", path=path),
        why=why,
        fix=(say("pass the directory that MDSWriter wrote, or one of its splits"),),
    )
