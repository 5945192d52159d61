"""The manifest as a file: written one way, read with nothing taken on trust.

Covers: JSON and its checks. Does not cover: what the fields mean (docs/cache-format.md), looking at data files.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Sequence
from typing import Any, TypeVar

from legroom.cache import npy
from legroom.cache.identity import DIGITS
from legroom.cache.manifest import (
    CHECKSUM,
    FILE,
    FORMAT,
    NAME,
    Array,
    Damaged,
    Manifest,
    Options,
    OtherFormat,
    Table,
    file_name,
    key_of,
)
from legroom.words import say

# The manifest's own checksum is its first line, over every byte that follows it.
OPENING = b'{\n "manifest_crc32": "%08x",\n'
_OPENING_LENGTH = len(OPENING % 0)
_CRC = re.compile(r"[0-9a-f]{8}")
_LARGEST = 1 << 50
_T = TypeVar("_T")


def to_json(manifest: Manifest) -> bytes:
    """The manifest as the file holds it."""
    value = {
        "format": FORMAT,
        "key": manifest.key,
        "hash": manifest.hash,
        "digest": manifest.digest,
        "options": {
            "keys": manifest.options.keys,
            "order": manifest.options.order,
            "version": manifest.options.version,
        },
        "source": {
            "paths": manifest.paths,
            "stamps": manifest.stamps,
            "bytes": manifest.source_bytes,
            "sample": manifest.sample,
            "format": manifest.kind,
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
        "dtype": npy.dtype_to_json(array.dtype),
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
    """Read a manifest; Damaged where anything is not as it must be, OtherFormat for another version."""
    opening, body = data[:_OPENING_LENGTH], data[_OPENING_LENGTH:]
    try:
        value = json.loads(data)
        if (
            isinstance(value, dict)
            and value.get("format") == FORMAT
            and opening != OPENING % zlib.crc32(body)
        ):
            raise Damaged(say("{name} is not what was written: its own crc32 differs", name=NAME))
    except Damaged:
        raise
    except (ValueError, RecursionError) as problem:
        raise Damaged(say("{name} is not JSON: {problem}", name=NAME, problem=problem)) from problem
    top = _of(value, dict, say("the manifest"))
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
    )
    if top.get("checksum") != CHECKSUM:
        raise Damaged(say("checksum is of an unknown kind"))
    if len(manifest.digest) != DIGITS.get(manifest.hash) or len(manifest.paths) != len(manifest.stamps):
        raise Damaged(say("digest or source is not whole"))
    if manifest.key != key or key_of(manifest.digest, manifest.hash, manifest.options) != key:
        raise Damaged(say("it belongs to another entry"))
    items: Sequence[Array | Table] = manifest.items
    if len({item.name for item in items}) != len(items) or len({item.file for item in items}) != len(items):
        raise Damaged(say("two arrays share a name or a file"))
    taken: set[str] = set()
    if any(item.file != file_name(item.name, item.file[item.file.rindex(".") :], taken) for item in items):
        raise Damaged(say("a file does not belong to its name"))
    if _int(top.get("bytes"), "bytes") != manifest.nbytes:
        raise Damaged(say("bytes do not add up"))
    return manifest


def _array(value: Any) -> Array:
    entry = _of(value, dict, "an array")
    try:
        dtype = npy.dtype_from_json(entry.get("dtype"))
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
        raise Damaged(say("bytes of an array are not those of its shape and dtype"))
    return array


def _table(value: Any) -> Table:
    entry = _of(value, dict, say("a table"))
    columns = _of(entry.get("columns"), dict, "columns")
    part_of = entry.get("part_of")
    return Table(
        name=_text(entry.get("name"), "name"),
        file=_file(entry.get("file"), ".arrow"),
        rows=_int(entry.get("rows"), "rows"),
        columns={
            _text(name, "column"): _text(kind, say("the type of a column")) for name, kind in columns.items()
        },
        nbytes=_int(entry.get("bytes"), "bytes"),
        crc32=_crc(entry.get("crc32")),
        stamp=_text(entry.get("stamp"), "stamp"),
        attributes=_of(entry.get("attributes"), dict, "attributes"),
        part_of=None if part_of is None else _text(part_of, "part_of"),
    )


def _of(value: Any, kind: type[_T], what: str) -> _T:
    if type(value) is not kind:
        raise Damaged(say("{what} is not a {kind}", what=what, kind=kind.__name__))
    return value


def _int(value: Any, what: str) -> int:
    if type(value) is not int or not 0 <= value <= _LARGEST:
        raise Damaged(say("{what} is not a number from 0 to 2^50", what=what))
    return value


def _number(value: Any) -> float:
    if type(value) not in (int, float) or not math.isfinite(value):
        raise Damaged(say("a time is not a number"))
    return float(value)


def _text(value: Any, what: str) -> str:
    return _of(value, str, what)


def _texts(value: Any) -> tuple[str, ...]:
    return tuple(_text(part, say("a text")) for part in _of(value, list, say("a list")))


def _ints(value: Any) -> tuple[int, ...]:
    numbers = _of(value, list, "a list")
    if not all(type(number) is int and 0 <= number <= _LARGEST for number in numbers):
        raise Damaged(say("{what} is not a number from 0 to 2^50", what=say("a length")))
    return tuple(numbers)


def _optional(value: Any, read: Any) -> Any:
    return None if value is None else read(value)


def _file(value: Any, suffix: str) -> str:
    name = _text(value, "file")
    if not FILE.fullmatch(name) or not name.endswith(suffix):
        raise Damaged(say("a file name is none of ours"))
    return name


def _crc(value: Any) -> str:
    text = _text(value, "crc32")
    if not _CRC.fullmatch(text):
        raise Damaged(say("crc32 is not eight hexadecimal digits"))
    return text
