"""What the files of a stream hold: their schema, and the groups of rows they can be read by.

Covers: footers and message headers of every file, read once; one schema for all; leaving out groups that a filter
rules out. Does not cover: reading rows (stream/parquet.py, stream/ipc.py).

A group is a Parquet row group or a record batch of an Arrow file. An Arrow stream, which cannot be entered in the
middle, is one group.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from legroom.errors import SourceChanged, UnknownFormat, UnsupportedData, UsageError
from legroom.formats.arrow_reader import ArrowReader
from legroom.formats.detect import open_source
from legroom.formats.source_file import SourceFile
from legroom.loader.stream import ipc as stream_ipc
from legroom.loader.stream import parquet as stream_parquet
from legroom.loader.stream.filter import Filter, column_error, groups_worth_reading, read_filter
from legroom.words import say

Kind = Literal["parquet", "arrow", "arrow-stream"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file, as it was when the stream was made."""

    path: Path
    kind: Kind
    size: int
    changed: int  # its modification time

    def require_unchanged(self) -> None:
        """Refuse a file that is no longer the one whose rows were counted."""
        found = os.stat(self.path)
        if (found.st_size, found.st_mtime_ns) != (self.size, self.changed):
            raise SourceChanged(
                say("{path} changed since the stream was made", path=self.path),
                why=say("it has {now} bytes, it had {then}", now=found.st_size, then=self.size),
                fix=(say("make the stream again once nobody writes to its files"),),
            )


@dataclass(frozen=True, slots=True)
class Group:
    """Rows that are read together."""

    file: int  # which file of the catalog
    index: int  # which group of that file
    rows: int


@dataclass(frozen=True)
class Catalog:
    """All files and groups of a stream, in order."""

    files: tuple[DataFile, ...]
    groups: tuple[Group, ...]
    schema: Any  # of the columns asked for, in the order asked for
    condition: Filter | None
    digest: str = ""  # the same for the same files and columns, wherever they lie

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The columns asked for and those the filter looks at."""
        needed = () if self.condition is None else self.condition.columns
        return tuple(dict.fromkeys((*self.columns, *needed)))

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def pruned(self) -> Catalog:
        """The catalog less the row groups in which no row can pass the filter."""
        if self.condition is None:
            return self
        kept: list[Group] = []
        for number, file in enumerate(self.files):
            own = [group for group in self.groups if group.file == number]
            if file.kind == "parquet":
                worth = groups_worth_reading(
                    file.path, self.condition.expression, {group.index for group in own}
                )
                own = [group for group in own if group.index in worth]
            kept += own
        return replace(self, groups=tuple(kept))


def look(paths: Sequence[Path], columns: str | Iterable[str] | None, filters: Any) -> Catalog:
    """Read what the files say about themselves; their schemas must agree on the columns that are needed."""
    files: list[DataFile] = []
    groups: list[Group] = []
    catalog: Catalog | None = None
    for number, path in enumerate(paths):
        file = _identify(path)
        facts = stream_parquet.look if file.kind == "parquet" else stream_ipc.look
        schema, counts = facts(file.path)
        if catalog is None:
            names = _chosen(schema, columns, path)
            catalog = Catalog((), (), _picked(schema, names), read_filter(filters, schema, path))
            needed = _picked(schema, catalog.read_columns)
        _require_same(needed, paths[0], schema, path)
        files.append(file)
        groups += [Group(number, index, rows) for index, rows in enumerate(counts) if rows]
    assert catalog is not None  # there is at least one path
    found = replace(catalog, files=tuple(files), groups=tuple(groups)).pruned()
    return replace(found, digest=_digest(found))


def _digest(catalog: Catalog) -> str:
    files = [(file.path.name, file.size) for file in catalog.files]
    groups = [(group.file, group.index, group.rows) for group in catalog.groups]
    kinds = [(field.name, str(field.type)) for field in catalog.schema]
    return hashlib.md5(repr((files, groups, kinds)).encode(), usedforsecurity=False).hexdigest()


def _identify(path: Path) -> DataFile:
    with SourceFile(path) as source:
        head = source.read_at(0, min(6, source.size))
    kind: Kind
    if head.startswith(b"PAR1"):
        kind = "parquet"
    elif head == b"ARROW1":
        kind = "arrow"
    else:
        with open_source(path) as reader:  # says what is wrong with a file that is nothing it knows
            if not isinstance(reader, ArrowReader):
                raise UnknownFormat(
                    say("{path} is neither Parquet nor Arrow", path=path),
                    why=say("only files of tables can be streamed"),
                    fix=(say("open it as arrays: legroom.open({path!r}).batches(…)", path=str(path)),),
                )
        kind = "arrow-stream"
    found = os.stat(path)
    return DataFile(path, kind, found.st_size, found.st_mtime_ns)


def _chosen(schema: Any, columns: str | Iterable[str] | None, path: Path) -> tuple[str, ...]:
    names = list(schema.names)
    if columns is None:
        taken = tuple(names)
    else:
        taken = (columns,) if isinstance(columns, str) else tuple(columns)
    if not taken or len(set(taken)) != len(taken):
        raise UsageError(
            say("columns={columns!r} is no choice of columns", columns=columns),
            why=say("it must name at least one column, and none twice"),
            fix=(say("leave columns out to take all of them"),),
        )
    for name in taken:
        if name not in names:
            raise column_error(name, names, path)
        if names.count(name) > 1:
            raise UnsupportedData(
                say("{path} has two columns named {name!r}", path=path, name=name),
                why=say("a batch is a mapping of names to columns"),
                fix=(say("rename one of them"), say("or name other columns: columns=[…]")),
            )
    return taken


def _picked(schema: Any, names: Iterable[str]) -> Any:
    from pyarrow import schema as make

    # Metadata and nullability differ between writers of the same data.
    return make([schema.field(name).remove_metadata().with_nullable(True) for name in names])


def _require_same(needed: Any, origin: Path, schema: Any, path: Path) -> None:
    for field in needed:
        if field.name not in schema.names:
            raise column_error(field.name, schema.names, path)
        here = schema.field(field.name).type
        if here != field.type:
            raise UnsupportedData(
                say("the files have different schemas: column {name!r}", name=field.name),
                why=say(
                    "it is {here} in {path} and {there} in {origin}",
                    here=here, path=path, there=field.type, origin=origin,
                ),
                fix=(say("write the files with one schema"), say("or leave the column out: columns=[…]")),
            )  # fmt: skip
