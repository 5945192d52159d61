"""Join the arrays and tables of several sources along their first axis, and refuse sources that do not match.

They must have the same names, columns, types, shapes of a row, encodings and classes: the same number may be another
class in another folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, Description, TableSpec, names_shown
from legroom.messages import joined, phrase, say


@dataclass(frozen=True, slots=True)
class Piece:
    """The part of an array that comes from one source."""

    source: int
    name: str
    offset: int  # in the array's bytes
    shape: tuple[int, ...]
    nbytes: int
    shift: int = 0  # added to every number: the offsets of joined ragged data
    skip: int = 0  # leading rows left out: the first offset of all but the first source


def require_joinable(descriptions: Sequence[Description], files: Sequence[str]) -> None:
    """Refuse sources with other names of arrays and tables, or with other classes; ``files`` are named in the error."""
    _same_names(descriptions, files)
    _same_classes(descriptions, files)


def table_parts(item: TableSpec, descriptions: Sequence[Description], files: Sequence[str]) -> list[TableSpec]:
    """That table of each source, under a name of its own."""
    found = []
    for index, description in enumerate(descriptions):
        spec = next(other for other in description.items if other.name == item.name)
        if not isinstance(spec, TableSpec) or spec.columns != item.columns:
            raise _cannot_join(item.name, _column_difference(item, spec, (files[0], files[index])))
        if _features(spec) != _features(item):
            why = say("{other} and {first} have different features", other=files[index], first=files[0])
            raise _cannot_join(item.name, why)
        found.append(replace(spec, name=f"{item.name}/{index}"))
    return found


def _features(table: TableSpec) -> object:
    """What datasets notes about columns, such as the names of classes: the same number may be another class."""
    noted: Any = table.attributes.get("huggingface")
    try:
        return json.loads(noted)["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return noted


def _same_names(descriptions: Sequence[Description], files: Sequence[str]) -> None:
    names = {item.name for item in descriptions[0].items}
    for index, description in enumerate(descriptions):
        others = {item.name for item in description.items}
        if others != names:
            odd = sorted(others ^ names)[0]
            raise _cannot_join(odd, _difference(names, others, (files[0], files[index])))


def _difference(first: set[str], other: set[str], files: tuple[str, str]) -> str:
    """Which names only one of two files has."""
    only = [(files[0], first - other), (files[1], other - first)]
    return joined(say("only {file} has {names}", file=file, names=names_shown(sorted(n))) for file, n in only if n)


def _column_difference(first: TableSpec, other: ArraySpec | TableSpec, files: tuple[str, str]) -> str:
    if not isinstance(other, TableSpec):
        return say("it is a table in {first} and an array in {other}", first=files[0], other=files[1])
    if found := _difference(set(first.columns), set(other.columns), files):
        return found
    name = next(name for name, kind in first.columns.items() if other.columns[name] != kind)
    return say("column {name!r} is {first_kind} in {first} and {kind} in {other}", name=name,
               first_kind=first.columns[name], first=files[0], kind=other.columns[name], other=files[1])  # fmt: skip


def _same_classes(descriptions: Sequence[Description], files: Sequence[str]) -> None:
    """A label is the number of a class in its own folder: the folders must have the same classes."""
    first = descriptions[0]
    for index, other in enumerate(descriptions):
        labelled = "imagefolder" in (first.format, other.format) and any(one.name == "label" for one in first.items)
        if labelled and (first.format, first.attributes) != (other.format, other.attributes):
            raise _cannot_join(
                "label", say("{other} and {first} have different classes", first=files[0], other=files[index])
            )


def joined_array(
    item: ArraySpec, descriptions: Sequence[Description], files: Sequence[str]
) -> tuple[ArraySpec, tuple[Piece, ...]]:
    """The array of all sources, and the part of each."""
    if not item.shape:
        raise _cannot_join(item.name, say("a scalar has no first axis to join along"))
    offsets = item.ragged is not None and item.name == f"{item.ragged}/offsets"
    pieces: list[Piece] = []
    rows = position = shift = 0
    for index, description in enumerate(descriptions):
        spec = _array(description, item)
        if spec.shape[1:] != item.shape[1:] or spec.dtype != item.dtype:
            why = say("{other} has {shape} {dtype}, {first} has {first_shape} {first_dtype}", other=files[index],
                      shape=spec.shape, dtype=spec.dtype, first=files[0], first_shape=item.shape,
                      first_dtype=item.dtype)  # fmt: skip
            raise _cannot_join(item.name, why)
        encodings = [one.attributes.get("mds_encoding") for one in (spec, item)]
        if spec.text != item.text or encodings[0] != encodings[1]:
            raise _cannot_join(
                item.name, say("{other} and {first} have different encodings", first=files[0], other=files[index])
            )
        skip = 1 if offsets and index else 0
        row_bytes = math.prod(item.shape[1:]) * item.dtype.itemsize
        nbytes = (spec.shape[0] - skip) * row_bytes
        pieces.append(Piece(index, item.name, position, spec.shape, nbytes, shift, skip))
        position += nbytes
        rows += spec.shape[0] - skip
        if offsets:
            values = next(other for other in description.items if other.name == f"{item.ragged}/values")
            shift += values.shape[0] if isinstance(values, ArraySpec) else 0
    whole = ArraySpec(item.name, (rows, *item.shape[1:]), item.dtype, item.attributes, item.ragged, item.text)
    return whole, tuple(pieces)


def _array(description: Description, item: ArraySpec) -> ArraySpec:
    found = next(other for other in description.items if other.name == item.name)
    if not isinstance(found, ArraySpec) or found.ragged != item.ragged:
        raise _cannot_join(item.name, say("it is an array in one file and something else in another"))
    return found


def _cannot_join(
    name: str, why: str, fix: str = phrase("open the files one by one, or pass the common names with keys=")
) -> UnsupportedData:
    return UnsupportedData(say("cannot join {name} across files", name=name), why=why, fix=(say(fix),))
