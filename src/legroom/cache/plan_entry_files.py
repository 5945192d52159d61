"""Plan a build: which files to write, of which sizes, and where their bytes lie in the sources.

Nothing is read or written here, apart from a reader's metadata. Several sources are joined along the first axis of
their arrays and tables. They must have the same names, columns, types and shapes of a row, and their values must mean
the same: the same number may be another class in another folder. Attributes that are not those of all are left out.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from legroom.cache import manifest
from legroom.cache.store_free_space import BuildNeed
from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Slab, TableSpec, names_shown
from legroom.messages import joined, listed, phrase, say
from legroom.remote.remote_object import SourcePath

_MOST_SHOWN = 80  # letters of a value in an error
_COMMON_NAMES = phrase("open the files one by one, or pass the common names with keys=")
_ONE_BY_ONE = phrase("open the files one by one")  # where they have no common names
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
    readers: tuple[str, ...] | None = None  # packages and versions of readers; revisions of Legroom's own
    kinds: tuple[str, ...] | None = None  # of several sources, where they differ

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
    readers = {one.reader or manifest.reader_identity(one.format) for one in descriptions}
    if len(descriptions) > 1:
        readers.add(manifest.reader_identity(manifest.JOIN))
    kinds = tuple(sorted({one.format for one in descriptions}))
    meaning = {name for item in first.items for name in item.meaning}
    return BuildPlan(
        first.format,
        tuple(arrays),
        tuple(named),
        _of_all([one.attributes for one in descriptions], meaning),
        tuple(sorted(one for one in readers if one is not None)) or None,
        kinds if len(kinds) > 1 else None,
    )


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
    """Refuse sources with other names of arrays and tables; ``files`` are named in the error."""
    _same_names(descriptions, files)


def table_parts(item: TableSpec, descriptions: Sequence[Description], files: Sequence[str]) -> list[TableSpec]:
    """That table of each source, under a name of its own."""
    found: list[TableSpec] = []
    for index, description in enumerate(descriptions):
        spec = next(other for other in description.items if other.name == item.name)
        if not isinstance(spec, TableSpec) or spec.columns != item.columns:
            common = isinstance(spec, TableSpec) and spec.columns.keys() & item.columns.keys()
            why = _column_difference(item, spec, (files[0], files[index]))
            raise _cannot_join(item.name, why, _COMMON_NAMES if common else _ONE_BY_ONE)
        _same_meaning(item, spec, (files[0], files[index]))
        found.append(replace(spec, name=f"{item.name}/{index}"))
    attributes = _of_all([spec.attributes for spec in found], item.meaning)
    return [replace(spec, attributes=attributes) for spec in found]


def _of_all(attributes: Sequence[Mapping[str, Any]], kept: Collection[str] = ()) -> dict[str, Any]:
    """The attributes that all have, with the same value; those of the first whose meaning is that of all."""
    first, *others = attributes
    return {
        name: value
        for name, value in first.items()
        if name in kept or all(name in other and _same(other[name], value) for other in others)
    }


def _same(one: Any, other: Any) -> bool:
    """Whether two values are the same in JSON: 1, 1.0 and True are not."""
    if isinstance(one, Mapping):
        return (
            isinstance(other, Mapping)
            and one.keys() == other.keys()
            and all(_same(value, other[name]) for name, value in one.items())
        )
    if isinstance(one, (list, tuple)):
        return isinstance(other, (list, tuple)) and len(one) == len(other) and all(map(_same, one, other))
    return type(one) is type(other) and bool(one == other)


def _same_meaning(first: ArraySpec | TableSpec, other: ArraySpec | TableSpec, files: tuple[str, str]) -> None:
    """Refuse values that the dtype calls the same, and that stand for different things."""
    mine, its = first.meaning, other.meaning
    if _same(mine, its) or _same([*mine.values()], [*its.values()]):  # other formats have other names for attributes
        return
    names = [*mine, *its]
    odd = next(name for name in names if (name in mine) != (name in its) or not _same(mine[name], its[name]))
    values = [_shortened(spec.meaning[odd]) if odd in spec.meaning else say("none") for spec in (other, first)]
    why = say("{other} and {first} have different {attribute}: {value} and {first_value}", other=files[1],
              first=files[0], attribute=odd, value=values[0], first_value=values[1])  # fmt: skip
    raise _cannot_join(first.name, why)


def _shortened(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}…"


def _same_names(descriptions: Sequence[Description], files: Sequence[str]) -> None:
    every = [{item.name for item in description.items} for description in descriptions]
    names = every[0]
    index = next((index for index, others in enumerate(every) if others != names), None)
    if index is None:
        return
    common = set.intersection(*every)
    kinds = list(dict.fromkeys(description.format for description in descriptions))
    if not common and len(kinds) > 1:
        at = next(at for at, one in enumerate(descriptions) if one.format != kinds[0])
        formats = say("the files have different formats: {formats}", formats=listed(kinds))
        raise UnsupportedData(
            say("cannot join {first} and {other}", first=files[0], other=files[at]),
            why=joined([formats, _difference(names, every[at], (files[0], files[at]))]),
            fix=(say("open the files of each format on their own"),),
        )
    why = _difference(names, every[index], (files[0], files[index]))
    raise _cannot_join(sorted(every[index] ^ names)[0], why, _COMMON_NAMES if common else _ONE_BY_ONE)


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


def joined_array(
    item: ArraySpec, descriptions: Sequence[Description], files: Sequence[str]
) -> tuple[ArraySpec, tuple[Piece, ...]]:
    """The array of all sources, and the part of each."""
    if not item.shape:
        raise _cannot_join(item.name, say("a scalar has no first axis to join along"))
    offsets = item.ragged is not None and item.name == f"{item.ragged}/offsets"
    pieces: list[Piece] = []
    rows = position = shift = 0
    every = [_array(description, item) for description in descriptions]
    for index, (spec, description) in enumerate(zip(every, descriptions, strict=True)):
        if spec.shape[1:] != item.shape[1:] or spec.dtype != item.dtype:
            why = say("{other} has {shape} {dtype}, {first} has {first_shape} {first_dtype}", other=files[index],
                      shape=spec.shape, dtype=spec.dtype, first=files[0], first_shape=item.shape,
                      first_dtype=item.dtype)  # fmt: skip
            raise _cannot_join(item.name, why)
        _same_meaning(item, spec, (files[0], files[index]))
        if spec.text != item.text:
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
    attributes = _of_all([spec.attributes for spec in every], item.meaning)
    if item.ragged is not None:
        attributes.pop("ragged_shape", None)
        attributes |= _rows_shape(every, files)
    return replace(item, shape=(rows, *item.shape[1:]), attributes=attributes), tuple(pieces)


def _rows_shape(specs: Sequence[ArraySpec], files: Sequence[str]) -> dict[str, Any]:
    """The shape of all rows of ragged data as an attribute, if they have one that is more than their number."""
    noted = [spec.attributes.get("ragged_shape") for spec in specs]
    shapes = [one if isinstance(one, list) and all(type(n) is int for n in one) else [] for one in noted]
    if not any(shapes):
        return {}
    for index, shape in enumerate(shapes):
        if len(shape) != len(shapes[0]) or shape[1:] != shapes[0][1:]:
            why = say("{other} has {shape} {dtype}, {first} has {first_shape} {first_dtype}", other=files[index],
                      shape=tuple(shape) or specs[index].shape, dtype=specs[index].dtype, first=files[0],
                      first_shape=tuple(shapes[0]) or specs[0].shape, first_dtype=specs[0].dtype)  # fmt: skip
            raise _cannot_join(str(specs[0].ragged), why)
    return {"ragged_shape": [sum(shape[0] for shape in shapes), *shapes[0][1:]]}


def _array(description: Description, item: ArraySpec) -> ArraySpec:
    found = next(other for other in description.items if other.name == item.name)
    if not isinstance(found, ArraySpec) or found.ragged != item.ragged:
        raise _cannot_join(item.name, say("it is an array in one file and something else in another"))
    return found


def _cannot_join(name: str, why: str, fix: str = _COMMON_NAMES) -> UnsupportedData:
    return UnsupportedData(say("cannot join {name} across files", name=name), why=why, fix=(say(fix),))
