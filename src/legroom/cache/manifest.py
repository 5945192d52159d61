"""The manifest of an entry: its records, key, file names, manifest.json and .npy headers.

docs/cache-format.md describes the fields. ``FORMAT`` grows when a reader of the current version could misread an
entry. An older entry is rebuilt. A newer one is left alone, and this version builds its own beside it.

A .npy header is a function of shape and dtype, so a reader compares bytes instead of parsing a file that it has no
reason to trust. Every program that reads .npy can read it: version 1.0 where it fits, padded to 64 bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import quote

import numpy as np

from legroom.cache.source_stamps_and_digests import DIGITS
from legroom.messages import say

FORMAT = 1
MANIFEST_NAME = "manifest.json"
CHECKSUM = "crc32"
FROZEN = "frozen"  # the format of an entry that legroom.freeze made: it has no source file
_AS_IT_IS = re.compile(r"[A-Za-z0-9_~-][A-Za-z0-9_.~-]{0,179}")  # names that quote() does not change
FILE_NAME = re.compile(r"[A-Za-z0-9_%~+=,-][A-Za-z0-9_.%~+=,-]{0,220}\.(?:npy|arrow)")

# Readers of ours that give other data for the same bytes than in an earlier version have a revision above 1. It is part
# of the key of an entry, as "legroom webdataset 2", like the package and version of a reader of another package. So an
# entry that an earlier reader built is not found. Where a record without revisions leads to one, its manifest names the
# format, and the entry is not used.
#
# Raise the number with every change after which a file gives other values, names or rows, or is refused because they
# would be wrong. An error in other words, or a faster reader, needs none: all entries of that format are built again.
JOIN = "join"  # stands beside the formats of several sources that are one dataset

# By the name of the format, as in formats/detect.py, and of how sources are joined; all others have revision 1.
REVISIONS = {
    "webdataset": 3,  # a link to a file of the same archive is that file; ._ files belong to no sample
    "imagefolder": 2,  # directories that begin with a dot are no classes, ._ files are no images
    "torch": 3,  # conj and neg bits, two tensors of one name are refused; tensors below tuples are found, or refused
    "npz": 2,  # members have the names by which numpy finds them
    "zarr": 2,  # chunks that were cut short are refused
    JOIN: 2,  # values that mean different things are refused, attributes that differ are left out
}
_OWN = re.compile(r"legroom (\S+) ([0-9]+)")


class Damaged(ValueError):
    """The manifest, or a file, is not valid for this format."""


class OtherFormat(ValueError):
    """An entry of another format version."""

    def __init__(self, version: int) -> None:
        super().__init__(say("entry format {version}; this version reads format {ours}", version=version, ours=FORMAT))
        self.newer = version > FORMAT


class OtherReader(OtherFormat):
    """An entry that another revision of a reader built, which gives other data for the same bytes."""

    def __init__(self, manifest: Manifest) -> None:
        ValueError.__init__(self, outdated(manifest))
        self.newer = reader_difference(manifest.formats, manifest.options.readers) > 0


def outdated(manifest: Manifest) -> str | None:
    """Why this version does not use a valid entry. None if it does."""
    other = reader_difference(manifest.formats, manifest.options.readers)
    if other < 0:
        return say("an earlier version built it, whose {format} reader gave other data", format=manifest.kind)
    if other > 0:
        return say("a newer version built it, whose {format} reader gives other data", format=manifest.kind)
    return None


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
        return npy_header(self.shape, self.dtype)


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
    """What affects the arrays besides the bytes of the source."""

    keys: tuple[str, ...] | None = None
    order: tuple[int, ...] | None = None  # rows of several files, where not in the order of the digest
    version: int | None = None  # built beside an entry of a newer format
    readers: tuple[str, ...] | None = None  # packages and versions of readers; revisions of Legroom's own
    dtype: str | None = None  # of a flat token file, which does not say it itself

    @property
    def suffix(self) -> str:
        if self == Options():
            return ""
        # Left out where they are not used: the keys of other entries stay as they were.
        more = {name: value for name in ("readers", "dtype") if (value := getattr(self, name)) is not None}
        text = json.dumps([self.keys, self.order, self.version, *([more] if more else [])])
        return "-" + hashlib.blake2b(text.encode(), digest_size=6).hexdigest()


@dataclass(frozen=True, slots=True)
class Manifest:
    """What an entry holds, where it came from, and which process built it."""

    key: str
    hash: str
    digest: str
    options: Options
    paths: tuple[str, ...]  # of the source, absolute; URLs without credentials
    stamps: tuple[str, ...]  # of each of them, "" for a folder
    source_bytes: int
    sample: str  # hash of a few pages of the source: a different sample is a different source
    kind: str  # the source's format
    arrays: tuple[Array, ...]
    tables: tuple[Table, ...]
    attributes: Mapping[str, Any]
    built_at: float
    built_by: str
    cgroups: tuple[int, ...] = ()  # inodes of the memory cgroups that its pages are charged to, the builder's own first
    kinds: tuple[str, ...] | None = None  # of several sources, where they differ

    @property
    def formats(self) -> tuple[str, ...]:
        """The formats of all its sources, and whether these are joined: what decides how they were read."""
        kinds = (self.kind,) if self.kinds is None else self.kinds
        return (*kinds, JOIN) if len(self.paths) > 1 else kinds

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
    """Whether a name in a store can be an entry's key."""
    return (
        re.fullmatch(r"(?:[0-9a-f]{32}|[0-9a-f]{64})(?:-(?:blake3|xxh3|version))?(?:-[0-9a-f]{12})?", name) is not None
    )


def stamp_of(stats: os.stat_result) -> str:
    """The stamp of a sealed data file. Any later change or replacement changes it."""
    return f"{stats.st_ino}-{stats.st_mtime_ns}-{stats.st_ctime_ns}"


def file_name(name: str, suffix: str, taken: set[str]) -> str:
    """A file name for an array or table: readable, safe on every file system, and unique."""
    if _AS_IT_IS.fullmatch(name) and (plain := (name + suffix).lower()) not in taken:
        taken.add(plain)
        return name + suffix
    stem = quote(name, safe="").replace("*", "%2A").lstrip(".") or "_"
    if len(stem) > 180 or not FILE_NAME.fullmatch(stem + suffix) or (stem + suffix).lower() in taken:
        stem = stem[:120].rstrip("%.") + "~" + hashlib.blake2b(name.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        if not FILE_NAME.fullmatch(stem + suffix):
            stem = "~" + stem[-16:]
    taken.add((stem + suffix).lower())
    return stem + suffix


# The manifest's own checksum is its first line, over every byte that follows it.
OPENING = b'{\n "manifest_crc32": "%08x",\n'
_OPENING_LENGTH = len(OPENING % 0)
_CRC = re.compile(r"[0-9a-f]{8}")
_LARGEST = 1 << 50
_T = TypeVar("_T")


def to_json(manifest: Manifest) -> bytes:
    """The content of manifest.json."""
    value = {
        "format": FORMAT,
        "key": manifest.key,
        "hash": manifest.hash,
        "digest": manifest.digest,
        "options": {
            "keys": manifest.options.keys,
            "order": manifest.options.order,
            "version": manifest.options.version,
            "readers": manifest.options.readers,
            "dtype": manifest.options.dtype,
        },
        "source": {
            "paths": manifest.paths,
            "stamps": manifest.stamps,
            "bytes": manifest.source_bytes,
            "sample": manifest.sample,
            "format": manifest.kind,
            **({} if manifest.kinds is None else {"formats": manifest.kinds}),
        },
        "checksum": CHECKSUM,
        "arrays": [_array_to_json(array) for array in manifest.arrays],
        "tables": [_table_to_json(table) for table in manifest.tables],
        "attributes": dict(manifest.attributes),
        "bytes": manifest.nbytes,
        "built": {"at": manifest.built_at, "by": manifest.built_by, "cgroups": manifest.cgroups},
    }
    # A line for each field, and for each array: json's own indentation takes ten times as long.
    lines = [f" {json.dumps(name)}: {_lines(part)}" for name, part in value.items()]
    body = (",\n".join(lines) + "\n}\n").encode("ascii")
    return OPENING % zlib.crc32(body) + body


def _lines(value: Any) -> str:
    if not isinstance(value, list) or not value:
        return json.dumps(value)
    return "[\n  " + ",\n  ".join(map(json.dumps, value)) + "\n ]"


def _array_to_json(array: Array) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": array.name,
        "file": array.file,
        "shape": array.shape,
        "dtype": dtype_to_json(array.dtype),
        "bytes": array.nbytes,
        "crc32": array.crc32,
        "stamp": array.stamp,
        "attributes": dict(array.attributes),
    }
    if array.ragged is not None:
        value |= {"ragged": array.ragged, "text": array.text}
    return value


def _table_to_json(table: Table) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": table.name,
        "file": table.file,
        "rows": table.rows,
        "columns": dict(table.columns),
        "bytes": table.nbytes,
        "crc32": table.crc32,
        "stamp": table.stamp,
        "attributes": dict(table.attributes),
    }
    if table.part_of is not None:
        value["part_of"] = table.part_of
    return value


def from_json(data: bytes, key: str) -> Manifest:
    """Parse a manifest. Raises Damaged if anything is invalid, OtherFormat for another version."""
    opening, body = data[:_OPENING_LENGTH], data[_OPENING_LENGTH:]
    try:
        value = json.loads(data.decode("ascii"))
        if isinstance(value, dict) and value.get("format") == FORMAT and opening != OPENING % zlib.crc32(body):
            raise Damaged(say("{name} is damaged: its crc32 differs", name=MANIFEST_NAME))
    except Damaged:
        raise
    except (ValueError, RecursionError) as problem:
        raise Damaged(say("{name} is not JSON: {problem}", name=MANIFEST_NAME, problem=problem)) from problem
    # Not translated from here on: the checksum is right, so only a defect of the writer or a forgery is reported.
    top = _of(value, dict, "the manifest")
    version = _int(top.get("format"), "format")
    if version != FORMAT:
        raise OtherFormat(version)
    source = _of(top.get("source"), dict, "source")
    options = _of(top.get("options"), dict, "options")
    built = _of(top.get("built"), dict, "built")
    manifest = Manifest(
        key=_text(top.get("key"), "key"),
        hash=_text(top.get("hash"), "hash"),
        digest=_text(top.get("digest"), "digest"),
        options=Options(
            keys=_optional(options.get("keys"), _texts),
            order=_optional(options.get("order"), _ints),
            version=_optional(options.get("version"), lambda value: _int(value, "version")),
            readers=_optional(options.get("readers"), _texts),
            dtype=_optional(options.get("dtype"), lambda value: _text(value, "dtype")),
        ),
        paths=_texts(source.get("paths")),
        stamps=_texts(source.get("stamps")),
        source_bytes=_int(source.get("bytes"), "source.bytes"),
        sample=_text(source.get("sample"), "sample"),
        kind=_text(source.get("format"), "source.format"),
        arrays=tuple(map(_array, _of(top.get("arrays"), list, "arrays"))),
        tables=tuple(map(_table, _of(top.get("tables"), list, "tables"))),
        attributes=_of(top.get("attributes"), dict, "attributes"),
        built_at=_number(built.get("at")),
        built_by=_text(built.get("by"), "built.by"),
        cgroups=_ints(built.get("cgroups", [])),
        kinds=_optional(source.get("formats"), _texts),
    )
    if top.get("checksum") != CHECKSUM:
        raise Damaged("unknown checksum algorithm")
    if len(manifest.digest) != DIGITS.get(manifest.hash) or len(manifest.paths) != len(manifest.stamps):
        raise Damaged("digest or source is incomplete")
    if manifest.key != key or key_of(manifest.digest, manifest.hash, manifest.options) != key:
        raise Damaged("it belongs to another entry")
    items: Sequence[Array | Table] = manifest.items
    if len({item.name for item in items}) != len(items) or len({item.file for item in items}) != len(items):
        raise Damaged("two arrays share a name or a file")
    taken: set[str] = set()
    if any(item.file != file_name(item.name, item.file[item.file.rindex(".") :], taken) for item in items):
        raise Damaged("a file name does not match its array or table")
    if _int(top.get("bytes"), "bytes") != manifest.nbytes:
        raise Damaged("the total of bytes is wrong")
    return manifest


def _array(value: Any) -> Array:
    entry = _of(value, dict, "an array")
    try:
        dtype = dtype_from_json(entry.get("dtype"))
    except ValueError as problem:
        raise Damaged(str(problem)) from problem
    ragged, text = entry.get("ragged"), entry.get("text", False)
    array = Array(
        name=_text(entry.get("name"), "name"),
        file=_file(entry.get("file"), ".npy"),
        shape=_ints(entry.get("shape")),
        dtype=dtype,
        crc32=_crc(entry.get("crc32")),
        stamp=_text(entry.get("stamp"), "stamp"),
        attributes=_of(entry.get("attributes"), dict, "attributes"),
        ragged=None if ragged is None else _text(ragged, "ragged"),
        text=_of(text, bool, "text"),
    )
    if len(array.shape) > 32 or _int(entry.get("bytes"), "bytes") != array.nbytes:  # and so at most 2^50
        raise Damaged("the size of an array does not match its shape and dtype")
    return array


def _table(value: Any) -> Table:
    entry = _of(value, dict, "a table")
    columns = _of(entry.get("columns"), dict, "columns")
    part_of = entry.get("part_of")
    return Table(
        name=_text(entry.get("name"), "name"),
        file=_file(entry.get("file"), ".arrow"),
        rows=_int(entry.get("rows"), "rows"),
        columns={_text(name, "column"): _text(kind, "the type of a column") for name, kind in columns.items()},
        nbytes=_int(entry.get("bytes"), "bytes"),
        crc32=_crc(entry.get("crc32")),
        stamp=_text(entry.get("stamp"), "stamp"),
        attributes=_of(entry.get("attributes"), dict, "attributes"),
        part_of=None if part_of is None else _text(part_of, "part_of"),
    )


def _of(value: Any, kind: type[_T], what: str) -> _T:
    if type(value) is not kind:
        raise Damaged(f"{what} is not a {kind.__name__}")
    return value


def _int(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise Damaged(f"{what} is not a number from 0 to 2^50")
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Damaged("a time is not a number")
    return float(value)


def _text(value: Any, what: str) -> str:
    return _of(value, str, what)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(part, "a text") for part in _of(value, list, "a list"))


def _ints(value: Any) -> tuple[int, ...]:
    numbers = _of(value, list, "a list")
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise Damaged("a length is not a number from 0 to 2^50")
    return tuple(numbers)


def _optional(value: Any, read: Any) -> Any:
    return None if value is None else read(value)


def _file(value: Any, suffix: str) -> str:
    name = _text(value, "file")
    if not FILE_NAME.fullmatch(name) or not name.endswith(suffix):
        raise Damaged("invalid file name")
    return name


def _crc(value: Any) -> str:
    text = _text(value, "crc32")
    if not _CRC.fullmatch(text):
        raise Damaged("crc32 is not eight hexadecimal digits")
    return text


ALIGNMENT = 64
_SIMPLE = re.compile(r"[<>|=]?(?:[biufcmMSUV?])[0-9]*(?:\[[0-9]*[a-zA-Zμ]+\])?")

Dtype = np.dtype[Any]


@lru_cache(maxsize=4096)
def npy_header(shape: tuple[int, ...], dtype: Dtype) -> bytes:
    """The .npy header: the bytes before the data."""
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
    """The dtype as a JSON value."""
    return np.lib.format.dtype_to_descr(dtype)


@lru_cache(maxsize=1024)
def can_be_stored(dtype: Dtype) -> bool:
    """Whether a .npy header and a manifest can express exactly this dtype."""
    try:
        return dtype_from_json(json.loads(json.dumps(dtype_to_json(dtype)))) == dtype
    except ValueError:  # numpy cannot express fields that overlap or are out of order
        return False


def dtype_from_json(value: Any) -> Dtype:
    """The dtype of a JSON value. Raises ValueError if it is not a plain dtype in native byte order."""
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
        raise ValueError(f"{value!r} is not a dtype") from problem
    if dtype.hasobject or not dtype.isnative:
        raise ValueError(f"{value!r} is not a native dtype without objects")
    return dtype


def _plain(value: str) -> str:
    if len(value) > 64 or not _SIMPLE.fullmatch(value):
        raise ValueError(f"{value!r} is not a dtype")
    return value


def _record(value: Any, depth: int = 0) -> Dtype:
    """A structured dtype of its fields, [name, dtype] or [name, dtype, shape] each.

    Padding, which aligned C structures have, is a field of bytes without a name: numpy would give it one.
    """
    if not isinstance(value, list) or not value or depth > 8:
        raise ValueError("not a list of fields")
    names: list[str] = []
    formats: list[Dtype] = []
    offsets: list[int] = []
    offset = 0
    for entry in value:
        if not isinstance(entry, (list, tuple)) or len(entry) not in (2, 3) or not isinstance(entry[0], str):
            raise ValueError("not a field")
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
        raise ValueError("not the shape of a field")
    return tuple(value)


# Revisions of readers


def reader_identity(format: str) -> str | None:
    """What stands in an entry's key for our reader of that format. None: nothing, it reads as it always did."""
    revision = REVISIONS.get(format, 1)
    return f"legroom {format} {revision}" if revision > 1 else None


def reader_identities() -> list[str]:
    """Those of all readers that have one."""
    return [one for name in REVISIONS if (one := reader_identity(name)) is not None]


def split_own_readers(readers: Iterable[str]) -> tuple[list[str], list[str]]:
    """Our readers among some identities, as those are now, and the identities of other packages."""
    now: list[str] = []
    others: list[str] = []
    for reader in readers:
        own = _OWN.fullmatch(reader)
        if own is None:
            others.append(reader)
        elif (one := reader_identity(own[1])) is not None:
            now.append(one)
    return now, others


def reader_difference(formats: Iterable[str], readers: Sequence[str] | None) -> int:
    """How the readers that built an entry differ from ours: below zero if one is earlier, above if one is newer."""
    built = {own[1]: int(own[2]) for reader in readers or () if (own := _OWN.fullmatch(reader))}
    others = [reader for reader in readers or () if not _OWN.fullmatch(reader)]
    for name in formats:
        if not any(f" {name} legroom==" in reader for reader in others):  # a package's format of the same name
            built.setdefault(name, 1)
    found = [revision - REVISIONS.get(name, 1) for name, revision in built.items()]
    return min(found, default=0) or max(found, default=0)
