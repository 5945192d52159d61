"""The files of a stream: finding them, reading their schemas and row groups once; reading Arrow files.

A row group here is a Parquet row group or a record batch of an Arrow file. An Arrow stream cannot be entered in the
middle, so it is one group. Groups in which no row can pass the filter are left out: parquet_row_groups.py knows them by
their statistics.

Arrow IPC files, Feather version 2 and Arrow streams are read in small steps, and mapped pages are released after
reading. Rows are copied out of the map and never returned as views of it: a batch that a consumer keeps would keep the
whole map, and mapped pages count as resident memory until they are released. The file must not be truncated meanwhile.
Feather version 1 and streams that are not files are not supported.
"""

from __future__ import annotations

import glob
import hashlib
import mmap
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from legroom.cache.downloads_in_store import temporary_file
from legroom.cache.expand_braces import expand_braces
from legroom.cache.find_or_build_entry import source_paths
from legroom.errors import LegroomError, SourceChanged, UnknownFormat, UnreadableSource, UnsupportedData, UsageError
from legroom.formats.arrow_reader import ArrowReader, BatchSizes, read_layout
from legroom.formats.base_table_reader import (
    arrow_errors,
    buffer_count,
    bytes_of_batch,
    names_of_columns,
    selectable,
    selecting_rows,
)
from legroom.formats.detect import open_source
from legroom.formats.file_reads_and_errors import SourceFile, unreadable
from legroom.loader.stream import parquet_row_groups
from legroom.loader.stream.parquet_row_groups import RowFilter, column_error, read_filter
from legroom.loader.stream.stream_memory import DecodeSteps, MemoryDivision, undecodable
from legroom.messages import listed, phrase, say
from legroom.remote.object_store import RemoteObject
from legroom.remote.remote_errors_and_retries import object_changed
from legroom.remote.remote_object import ObjectStamp, ObjectUrl, SourcePath, is_url, local_path
from legroom.system.argument_checks import check_path, not_a_path
from legroom.system.lazy_and_optional_imports import require

FileKind = Literal["parquet", "arrow", "arrow-stream"]


@dataclass(frozen=True, slots=True)
class DataFile:
    """One file, as it was when the stream was created."""

    path: SourcePath
    kind: FileKind
    size: int
    changed: int  # its modification time
    stamp: ObjectStamp | None = None  # of a remote object

    def local(self, *, whole: bool = True) -> AbstractContextManager[Path]:
        """The file on this machine. A remote object fills it while it is read, and it is removed afterwards."""
        if self.stamp is None:
            return nullcontext(Path(self.path))
        return _local(self.path, self.stamp, whole)

    def require_unchanged(self) -> None:
        """Refuse a file that has changed since its rows were counted."""
        if isinstance(self.path, ObjectUrl):
            if RemoteObject(self.path).stat() != self.stamp:
                raise object_changed(self.path)
            return
        found = os.stat(self.path)
        if (found.st_size, found.st_mtime_ns) != (self.size, self.changed):
            raise SourceChanged(
                say("{path} changed since the stream was made", path=self.path),
                why=say("{now} bytes now, {then} before", now=found.st_size, then=self.size),
                fix=(say("create the stream again when its files no longer change"),),
            )


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Rows that are read together."""

    file: int  # which file of the catalog
    index: int  # which group of that file
    rows: int


@dataclass(frozen=True)
class Catalog:
    """All files and groups of a stream, in order."""

    files: tuple[DataFile, ...]
    groups: tuple[RowGroup, ...]
    schema: Any  # of the columns asked for, in the order asked for
    condition: RowFilter | None
    digest: str = ""  # the same for the same files and columns in any directory

    @property
    def columns(self) -> tuple[str, ...]:
        return tuple(self.schema.names)

    @property
    def read_columns(self) -> tuple[str, ...]:
        """The columns asked for and those that the filter needs."""
        needed = () if self.condition is None else self.condition.columns
        return tuple(dict.fromkeys((*self.columns, *needed)))

    @property
    def rows(self) -> int:
        return sum(group.rows for group in self.groups)

    def pruned(self) -> Catalog:
        """The catalog without the row groups in which no row can pass the filter."""
        if self.condition is None:
            return self
        kept: list[RowGroup] = []
        for number, file in enumerate(self.files):
            own = [group for group in self.groups if group.file == number]
            if file.kind == "parquet":
                with file.local(whole=False) as path:
                    worth = parquet_row_groups.groups_worth_reading(
                        path, self.condition.expression, {group.index for group in own}
                    )
                own = [group for group in own if group.index in worth]
            kept += own
        return replace(self, groups=tuple(kept))


def read_catalog(paths: Sequence[SourcePath], columns: str | Iterable[str] | None, filters: Any) -> Catalog:
    """Read the metadata of all files; their schemas must agree on the columns that are needed."""
    files: list[DataFile] = []
    groups: list[RowGroup] = []
    catalog: Catalog | None = None
    for number, path in enumerate(paths):
        stamp = RemoteObject(path).stat() if isinstance(path, ObjectUrl) else None
        with nullcontext(Path(path)) if stamp is None else _local(path, stamp, False) as local:
            file = replace(_identify(local), path=path, stamp=stamp)
            facts = parquet_row_groups.read_schema if file.kind == "parquet" else read_schema
            schema, counts = facts(local)
            names_of_columns(schema, local)
        if catalog is None:
            names = _chosen(schema, columns, path)
            catalog = Catalog((), (), _schema_of(schema, names), read_filter(filters, schema, path))
            needed = _schema_of(schema, catalog.read_columns)
        _require_same(needed, paths[0], schema, path, given=columns is not None)
        files.append(file)
        groups += [RowGroup(number, index, rows) for index, rows in enumerate(counts) if rows]
    assert catalog is not None  # there is at least one path
    found = replace(catalog, files=tuple(files), groups=tuple(groups)).pruned()
    return replace(found, digest=_digest(found))


def _local(path: SourcePath, stamp: ObjectStamp, whole: bool) -> AbstractContextManager[Path]:
    assert isinstance(path, ObjectUrl)
    return temporary_file(path, stamp, whole=whole)


def _digest(catalog: Catalog) -> str:
    files = [(file.path.name, file.size) for file in catalog.files]
    groups = [(group.file, group.index, group.rows) for group in catalog.groups]
    kinds = [(field.name, str(field.type)) for field in catalog.schema]
    return hashlib.md5(repr((files, groups, kinds)).encode(), usedforsecurity=False).hexdigest()


def _identify(path: Path) -> DataFile:
    with SourceFile(path) as source:
        head = source.read_at(0, min(6, source.size))
    kind: FileKind
    if head.startswith(b"PAR1"):
        kind = "parquet"
    elif head == b"ARROW1":
        kind = "arrow"
    else:
        with open_source(path) as reader:  # raises the error for an unknown or damaged file
            if not isinstance(reader, ArrowReader):
                raise UnknownFormat(
                    say("{path} is neither Parquet nor Arrow", path=path),
                    why=say("only Parquet and Arrow files can be streamed"),
                    fix=(say("open it as arrays: legroom.open({path!r}).batches(…)", path=str(path)),),
                )
        kind = "arrow-stream"
    found = os.stat(path)
    return DataFile(path, kind, found.st_size, found.st_mtime_ns)


def _chosen(schema: Any, columns: str | Iterable[str] | None, path: SourcePath) -> tuple[str, ...]:
    names = list(schema.names)
    if columns is None:
        taken = tuple(names)
    else:
        taken = (columns,) if isinstance(columns, str) else tuple(columns) if isinstance(columns, Iterable) else ()
    if not taken or not all(isinstance(one, str) for one in taken) or len(set(taken)) != len(taken):
        raise UsageError(
            say("columns must name at least one column, and none twice (got {columns!r})", columns=columns),
            fix=(say("omit columns to read all of them"),),
        )
    for name in taken:
        if name not in names:
            raise column_error(name, names, path)
        if names.count(name) > 1:
            raise UnsupportedData(
                say("{path} has two columns named {name!r}", path=path, name=name),
                why=say("a batch maps each name to one column"),
                fix=(say("rename one of them"), say("or select other columns: columns=[…]")),
            )
    return taken


def _schema_of(schema: Any, names: Iterable[str]) -> Any:
    from pyarrow import schema as make

    # Metadata and nullability differ between writers of the same data.
    return make([schema.field(name).remove_metadata().with_nullable(True) for name in names])


def _require_same(needed: Any, origin: SourcePath, schema: Any, path: SourcePath, *, given: bool) -> None:
    for field in needed:
        if field.name not in schema.names:
            raise _lacks(field.name, needed, origin, schema, path, given=given)
        here = schema.field(field.name).type
        if here != field.type:
            raise UnsupportedData(
                say("the files have different schemas: column {name!r}", name=field.name),
                why=say(
                    "it is {here} in {path} and {there} in {origin}",
                    here=here, path=path, there=field.type, origin=origin,
                ),
                fix=(say("write the files with one schema"), say("or omit the column: columns=[…]")),
            )  # fmt: skip


def _lacks(name: str, needed: Any, origin: SourcePath, schema: Any, path: SourcePath, *, given: bool) -> LegroomError:
    """The error for a file without a column: one that was asked for, or that the first file has."""
    if given:
        return column_error(name, schema.names, path)
    common = [one for one in needed.names if one in schema.names]
    return UnsupportedData(
        say("the files have different columns: {path} has no {name!r}", path=path, name=name),
        why=say("{origin} has it; without columns= all columns of the first file are read", origin=origin),
        fix=(
            say("stream them separately"),
            *([say("or read columns that all of them have: columns={names}", names=common)] if common else []),
        ),
    )


Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]

_ENDINGS = (".parquet", ".pq", ".arrow", ".feather", ".ipc")
_MAGIC = "*?["


def expand(paths: Paths) -> list[SourcePath]:
    """The files, each once: patterns and directories sorted by name, lists in the order given."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    if not given:
        raise UsageError(
            say("no files to stream"),
            why=say("the list of paths is empty"),
            fix=(say("pass a file, a directory, a pattern such as 'train-*.parquet', or a list of them"),),
        )
    found: dict[SourcePath, None] = {}
    for one in given:
        if not isinstance(one, (str, os.PathLike)):
            raise not_a_path(one)
        check_path(say("the path"), one)
        text = os.path.expanduser(os.fspath(one))
        local = local_path(text) if is_url(text) else text
        for path in source_paths(text) if local is None else _files(local):
            found[path] = None
    return list(found)


def _files(text: str) -> list[Path]:
    path = Path(text)
    # An existing file is taken literally, even when its name has brackets in it.
    if path.is_dir():
        return _inside(path)
    if not path.exists() and (names := expand_braces(text)):
        return [file for name in names for file in _files(name)]
    if path.exists() or not any(mark in text for mark in _MAGIC):
        if not path.exists():
            raise unreadable(path, FileNotFoundError())
        return [path]
    matched = sorted(Path(name) for name in glob.glob(text, recursive=True))
    files = [match for match in matched if match.is_file()]
    if not files:
        raise UnreadableSource(
            say("no file matches {pattern!r}", pattern=text),
            why=say("searched from {here}", here=os.getcwd()),
            fix=(say("check the pattern:\nls -d PATTERN"), say("** matches directories of any depth")),
        )
    return files


def _inside(folder: Path) -> list[Path]:
    """The data files of a directory and those below it; names that begin with . or _ are metadata of other programs."""
    found = []
    for base, folders, names in os.walk(folder):
        folders[:] = [name for name in folders if not name.startswith((".", "_"))]
        found += [Path(base) / name for name in names if not name.startswith((".", "_"))]
    files = sorted(path for path in found if path.suffix.lower() in _ENDINGS)
    if not files:
        raise UnreadableSource(
            say("{folder} has no Parquet or Arrow files", folder=folder),
            why=say("{count} files found, none ending in {endings}", count=len(found), endings=listed(_ENDINGS)),
            fix=(say("pass the files or a pattern: then the content decides, not the name"),),
        )
    return files


_FILE = b"ARROW1"


def read_schema(path: Path) -> tuple[Any, list[int]]:
    """The schema, and the rows of each record batch; of a stream, which is one group, all rows."""
    arrow = require("pyarrow", "parquet", phrase("Arrow IPC"))
    with SourceFile(path) as source:
        is_file = source.read_at(0, len(_FILE)) == _FILE
        with arrow_errors(path, say("its schema")), source.for_arrow(arrow) as file:
            schema = (arrow.ipc.open_file if is_file else arrow.ipc.open_stream)(file).schema
        layout = read_layout(source)
    return schema, [batch.rows for batch in layout.batches] if is_file else [layout.rows]


class IpcSource:
    """A mapped Arrow file or stream; it is unmapped when the last view of it is deleted."""

    def __init__(self, path: Path, columns: Sequence[str], steps: DecodeSteps) -> None:
        self.path = path
        self._columns, self._steps = list(columns), steps
        self._arrow = require("pyarrow", "parquet", phrase("Arrow IPC"))
        with SourceFile(path) as source:
            self._is_file = source.read_at(0, len(_FILE)) == _FILE
            self._layout = read_layout(source)
            source.wait_for_all()  # it is mapped
        with path.open("rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        with arrow_errors(path, say("its schema")):
            self._schema = self._reader(None).schema
            fields = [self._schema.get_field_index(name) for name in self._columns]
            self._options = self._arrow.ipc.IpcReadOptions(included_fields=fields, use_threads=False)
            self._batches = self._reader(self._options) if self._is_file else None

    def read(self, group: int, division: MemoryDivision) -> Iterator[Any]:
        """The rows of one group from its first to its last, a step at a time."""
        numbers = [group] if self._is_file else range(len(self._layout.batches))
        source = self._batches if self._batches is not None else self._reader(self._options)
        for number in numbers:
            facts, doing = self._layout.batches[number], say("record batch {number}", number=number)
            large = self._require_fits(number, facts, division)
            with arrow_errors(self.path, doing):
                batch = source.get_batch(number) if self._is_file else source.read_next_batch()
                # Offsets come from the file, so they are validated. A full check of a large batch would read all of it.
                batch.validate(full=not large)
                batch = batch.select(self._columns)
            rows = self._steps.rows(self._plain(facts) // max(1, facts.rows))
            for start in range(0, facts.rows, rows):
                with arrow_errors(self.path, doing):
                    part = copied(batch.slice(start, rows))
                taken = bytes_of_batch(part)
                self._steps.read(taken)
                self._release_pages(taken)
                yield part

    def row_bytes(self, group: int) -> int | None:
        """Average bytes of a row."""
        batches = [self._layout.batches[group]] if self._is_file else self._layout.batches
        rows = max(1, sum(batch.rows for batch in batches))
        return -(-sum(self._plain(batch) for batch in batches) // rows)

    def close(self) -> None:
        """Drop the map: it is unmapped when nothing refers to it."""
        self._batches = None

    def _reader(self, options: Any) -> Any:
        file = self._arrow.BufferReader(self._arrow.py_buffer(self._map))
        opener = self._arrow.ipc.open_file if self._is_file else self._arrow.ipc.open_stream
        return opener(file, options=options)

    def _plain(self, facts: BatchSizes) -> int:
        """Bytes of the columns that are read, uncompressed; of all columns where they cannot be separated."""
        counts = [buffer_count(field.type) for field in self._schema]
        if None in counts or sum(count or 0 for count in counts) != len(facts.buffers):
            return sum(facts.buffers)
        total = at = 0
        for field, count in zip(self._schema, counts, strict=True):
            if field.name in self._columns:
                total += sum(facts.buffers[at : at + (count or 0)])
            at += count or 0
        return total

    def _require_fits(self, number: int, facts: BatchSizes, division: MemoryDivision) -> bool:
        """Whether the batch is too large to be validated; refuses one that must be decoded whole and is too large."""
        held = sum(sum(one.buffers) for one in self._layout.dictionaries)
        needed = held + self._plain(facts)
        if needed > division.decode and (facts.compressed or held > division.decode):
            raise undecodable(
                say("record batch {number} of {path}", number=number, path=self.path),
                needed,
                division,
                say("a compressed batch is decompressed as a whole")
                if facts.compressed
                else say("its dictionaries are held as a whole"),
                say("or write it in smaller batches: pyarrow.feather.write_feather(…, chunksize=…)"),
            )
        return needed > division.decode

    def _release_pages(self, nbytes: int) -> None:
        """Unmap pages that have been copied; the page cache still has them."""
        if nbytes and hasattr(mmap, "MADV_DONTNEED"):
            self._map.madvise(mmap.MADV_DONTNEED)


def copied(batch: Any) -> Any:
    """A record batch in memory of its own, as large as its rows."""
    import numpy as np
    import pyarrow

    with selecting_rows():
        return selectable(batch).take(pyarrow.array(np.arange(batch.num_rows)))
