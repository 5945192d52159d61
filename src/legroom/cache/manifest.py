"""The manifest of an entry: what it holds, where it came from, who built it.

Covers: the records, keys, file names. Does not cover: the manifest as a file (manifest_json.py), the bytes of the
arrays (attach.py looks at sizes and headers, verify.py at checksums).

The fields are described in docs/cache-format.md. ``FORMAT`` grows when a reader of the present version could
misread an entry: an older entry is built anew, a newer one is left alone and built beside.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

from legroom.cache import npy
from legroom.cache.npy import Dtype
from legroom.words import say

FORMAT = 1
NAME = "manifest.json"
CHECKSUM = "crc32"
_AS_IT_IS = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9_.~-]{0,179}")  # what quote() leaves alone
FILE = re.compile(r"[A-Za-z0-9_%~+=,-][A-Za-z0-9_.%~+=,-]{0,220}\.(?:npy|arrow)")


class Damaged(ValueError):
    """The manifest, or a file, is not what an entry of this format holds."""


class OtherFormat(ValueError):
    """An entry of another format version."""

    def __init__(self, version: int) -> None:
        super().__init__(say("format {version}, this is format {ours}", version=version, ours=FORMAT))
        self.version = version


@dataclass(frozen=True, slots=True)
class Array:
    """One .npy file of the entry."""

    name: str
    file: str
    shape: tuple[int, ...]
    dtype: Dtype
    crc32: str
    stamp: str  # of the file since it was sealed: inode, mtime and ctime
    attributes: Mapping[str, Any] = field(default_factory=dict)
    ragged: str | None = None
    text: bool = False

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def header(self) -> bytes:
        return npy.header(self.shape, self.dtype)


@dataclass(frozen=True, slots=True)
class Table:
    """One Arrow IPC file of the entry."""

    name: str
    file: str
    rows: int
    columns: Mapping[str, str]
    nbytes: int
    crc32: str
    stamp: str
    attributes: Mapping[str, Any] = field(default_factory=dict)
    part_of: str | None = None  # the table that this is a shard of; shards are in the order of their rows


@dataclass(frozen=True, slots=True)
class Options:
    """What changes the arrays besides the bytes of the source."""

    keys: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None  # rows of several files, where not in the order of the digest
    version: int | None = None  # built beside an entry of a newer format

    @property
    def suffix(self) -> str:
        if self == Options():
            return ""
        text = json.dumps([self.keys, self.order, self.version])
        return "-" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """An entry in words and numbers."""

    key: str
    hash: str
    digest: str
    options: Options
    paths: tuple[str, ...]  # of the source, absolute
    stamps: tuple[str, ...]  # of each of them, "" for a folder
    source_bytes: int
    sample: str  # of a few pages of the source: another sample is another source
    kind: str  # the source's format
    arrays: tuple[Array, ...]
    tables: tuple[Table, ...]
    attributes: Mapping[str, Any]
    built_at: float
    built_by: str
    cgroups: tuple[
        int, ...
    ] = ()  # inodes of the memory cgroups that its pages are charged to, the builder's own first

    @property
    def items(self) -> list[Array | Table]:
        """Arrays, then tables."""
        return [*self.arrays, *self.tables]

    @property
    def nbytes(self) -> int:
        """The bytes of all its data files."""
        arrays = sum(len(array.header) + array.nbytes for array in self.arrays)
        return arrays + sum(table.nbytes for table in self.tables)


def key_of(digest: str, algorithm: str, options: Options) -> str:
    """The name of the entry's directory."""
    return digest + ("" if algorithm == "md5" else f"-{algorithm}") + options.suffix


def is_key(name: str) -> bool:
    """Whether a name in a store can be an entry's."""
    return (
        re.fullmatch(r"(?:[0-9a-f]{32}|[0-9a-f]{64})(?:-(?:blake3|xxh3))?(?:-[0-9a-f]{12})?", name)
        is not None
    )


def stamp_of(stats: os.stat_result) -> str:
    """A data file as it was sealed: whatever changes, swaps or replaces it afterwards changes this."""
    return f"{stats.st_ino}-{stats.st_mtime_ns}-{stats.st_ctime_ns}"


def file_name(name: str, suffix: str, taken: set[str]) -> str:
    """A file name for an array or table: readable, safe on every file system, and not taken."""
    if _AS_IT_IS.fullmatch(name) and (plain := (name + suffix).lower()) not in taken:
        taken.add(plain)
        return name + suffix
    stem = quote(name, safe="").replace("*", "%2A").lstrip(".") or "_"
    if len(stem) > 180 or not FILE.fullmatch(stem + suffix) or (stem + suffix).lower() in taken:
        stem = (
            stem[:120].rstrip("%.")
            + "~"
            + hashlib.blake2b(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        )
        if not FILE.fullmatch(stem + suffix):
            stem = "~" + stem[-16:]
    taken.add((stem + suffix).lower())
    return stem + suffix
