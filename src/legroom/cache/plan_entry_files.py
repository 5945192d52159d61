"""Plan a build: which files to write, of which sizes, and where their bytes lie in the sources.

Nothing is read or written here, apart from a reader's metadata. Several sources are joined along the first axis of
their arrays and tables. They must have the same names, columns, types, shapes of a row, encodings and classes: the same
number may be another class in another folder.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from legroom.cache import manifest
from legroom.cache.store_free_space import BuildNeed
from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Slab, TableSpec, names_shown
from legroom.messages import joined, phrase, say
from legroom.remote.remote_object import SourcePath

_OTHER_FILES = 8  # the directory, the manifest, lock files, records


@dataclass(frozen=True, slots=True)
class ArrayTarget:
    """One .npy file to write."""

    spec: ArraySpec
    file: str
    header: bytes
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return len(self.header) + self.spec.nbytes


@dataclass(frozen=True, slots=True)
class TableTarget:
    """One Arrow file to write."""

    spec: TableSpec
    file: str
    source: int
    name: str  # in the source
    part_of: str | None = None

    @property
    def size(self) -> int:
        return self.spec.nbytes


@dataclass(frozen=True)
class BuildPlan:
    """Everything a build will write."""

    kind: str
    arrays: tuple[ArrayTarget, ...]
    tables: tuple[TableTarget, ...]
    attributes: Mapping[str, Any]
    readers: tuple[str, ...] | None = None  # packages and versions of readers that are not Legroom's

    @property
    def targets(self) -> list[ArrayTarget | TableTarget]:
        """Arrays, then tables."""
        return [*self.arrays, *self.tables]

    @cached_property
    def nbytes(self) -> int:
        """Bytes of data: the total of the progress."""
        return sum(target.spec.nbytes for target in self.targets)

    @property
    def need(self) -> BuildNeed:
        """What to reserve: whole pages, space for the manifest, one inode per file, some for locks and records."""
        pages = sum(-(-target.size // 4096) * 4096 for target in self.targets)
        files = len(self.arrays) + len(self.tables)
        several = len(self.arrays) > 1 or bool(self.tables)
        return BuildNeed(pages + (1 << 16) + 1024 * files, files + _OTHER_FILES, several=several)


def plan_files(descriptions: Sequence[Description], sources: Sequence[SourcePath]) -> BuildPlan:
    """The files to write for these sources, in the order of their rows."""
    files = [str(source) for source in sources]  # as messages name them
    first = descriptions[0]
    taken: set[str] = set()
    arrays: list[ArrayTarget] = []
    tables: list[TableTarget] = []
    if len(descriptions) > 1:
        require_joinable(descriptions, files)
    for item in first.items:
        if isinstance(item, TableSpec):
            tables.extend(_tables(item, descriptions, files))
            continue
        if not manifest.can_be_stored(item.dtype):
            raise UnsupportedData(
                say("{name} cannot be stored as an array", name=item.name),
                why=say("the .npy format cannot store dtype {dtype}", dtype=item.dtype),
                fix=(say("load only what you need: keys=[…]"),),
            )
        spec = item
        pieces: tuple[Piece, ...] = (Piece(0, item.name, 0, item.shape, item.nbytes),)
        if len(descriptions) > 1:
            spec, pieces = joined_array(item, descriptions, files)
        name = manifest.file_name(item.name, ".npy", taken)
        arrays.append(ArrayTarget(spec, name, manifest.npy_header(spec.shape, spec.dtype), pieces))
    named = [replace(table, file=manifest.file_name(table.spec.name, ".arrow", taken)) for table in tables]
    readers = tuple(sorted({one.reader for one in descriptions if one.reader is not None}))
    return BuildPlan(first.format, tuple(arrays), tuple(named), first.attributes, readers or None)


def _tables(item: TableSpec, descriptions: Sequence[Description], files: Sequence[str]) -> list[TableTarget]:
    """One table, or one per source: each in its own file, presented as one table."""
    if len(descriptions) == 1:
        return [TableTarget(item, "", 0, item.name)]
    parts = table_parts(item, descriptions, files)
    return [TableTarget(part, "", index, item.name, item.name) for index, part in enumerate(parts)]


class SourceLayout:
    """Where the pieces of all arrays lie in their sources: raw, in slabs, or neither.

    Read once, before any thread starts: a reader is used by one thread at a time.
    """

    def __init__(self, readers: Sequence[BaseReader], targets: Sequence[ArrayTarget]) -> None:
        self.extents: dict[tuple[int, str], Extent | None] = {}
        self.slabs: dict[tuple[int, str], Sequence[Slab] | None] = {}
        for target in targets:
            for piece in target.pieces:
                reader, key = readers[piece.source], (piece.source, piece.name)
                # A shifted piece has other values in the entry than in the file.
                extent = None if piece.shift else reader.extent(piece.name)
                whole = piece.shift == 0 and piece.skip == 0
                if extent is not None and extent.checksum is not None and not whole:
                    extent = None  # a part cannot be compared with it
                self.extents[key] = extent
                self.slabs[key] = reader.slabs(piece.name) if whole and extent is None else None

    @property
    def decodes(self) -> bool:
        """Whether some array is stored differently in its file than in memory."""
        return any(extent is None for extent in self.extents.values())


def decoding_bytes(
    readers: Sequence[BaseReader], targets: Sequence[ArrayTarget | TableTarget], layout: SourceLayout, *, by_map: bool
) -> int:
    """Bytes of memory that decoding takes in addition to the files, with one thread."""
    most = 0
    for target in targets:
        if isinstance(target, TableTarget):
            most = max(most, readers[target.source].decoding(target.name))
            continue
        for piece in target.pieces:
            key = piece.source, piece.name
            slabs = layout.slabs[key]
            if slabs is not None:
                most = max(most, max((slab.decoding for slab in slabs), default=0))
            elif layout.extents[key] is None:
                plain = by_map and piece.shift == 0 and piece.skip == 0
                beside = 0 if plain else math.prod(piece.shape) * target.spec.dtype.itemsize
                most = max(most, readers[piece.source].decoding(piece.name) + beside)
    return most


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
