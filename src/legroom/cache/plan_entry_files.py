"""Plan a build: which files to write, of which sizes, and where their bytes lie in the sources.

Nothing is read or written here, apart from a reader's metadata. join_sources.py joins several sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from legroom.cache import manifest
from legroom.cache.join_sources import Piece, joined_array, require_joinable, table_parts
from legroom.cache.store_free_space import BuildNeed
from legroom.errors import UnsupportedData
from legroom.formats.base_reader import ArraySpec, BaseReader, Description, Extent, Slab, TableSpec
from legroom.messages import say
from legroom.remote.object_url import SourcePath

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
