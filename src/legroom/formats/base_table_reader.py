"""Base class of the readers of tables (Parquet, Arrow IPC): choose columns, write an uncompressed Arrow IPC file.

Also computes upper bounds of what Arrow types take in an IPC file. Disk space and memory are reserved by them.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError, UnsupportedData
from legroom.formats.base_reader import FileReader, TableSpec, as_json, column_names, what_is_read
from legroom.formats.file_reads_and_errors import damaged, unreadable
from legroom.formats.fill_output_arrays import Progress, no_progress
from legroom.messages import phrase, say
from legroom.system.file_writes import WrittenThrough
from legroom.system.lazy_and_optional_imports import require

NAME = "table"  # the file holds one table without a name
_HIDDEN_METADATA = {b"ARROW:schema"}  # the encoded schema itself
FILE_OVERHEAD = 4096  # magic numbers, end markers and slack
_BUFFER = 16 + 64 + 16  # its entry in the header, the padding after it, one offset more than rows
_BATCH = 512 + 24 + 64  # a message's frame, its block in the footer, padding


class TableReader(FileReader):
    """A file that holds one table."""

    def _library_errors(self, name: str | None) -> AbstractContextManager[None]:
        return arrow_errors(self.path, what_is_read(name))

    def _batches(self) -> Iterator[Any]:
        """Record batches with the selected columns, validated so that writing them is safe."""
        raise NotImplementedError(f"{type(self).__name__} has no method _batches")

    def _columns(self, schema: Any) -> list[str]:
        """The selected columns: ``column``, ``table/column``, or ``table`` for all."""
        names = names_of_columns(schema, self.path)
        double = {name for name, count in Counter(names).items() if count > 1}
        if double:
            raise UnsupportedData(
                say("{path} has two columns named {name!r}", path=self.path, name=min(double)),
                why=say("column names must be unique"),
                fix=(say("rename one of them"),),
            )
        taken = self.selection.columns(NAME, names)
        self.selection.check(column_names(NAME, taken), names, self.path)
        return taken

    def _spec(self, schema: Any, rows: int, nbytes: int) -> TableSpec:
        metadata = schema.metadata or {}
        notes = {as_json(key): as_json(value) for key, value in metadata.items() if key not in _HIDDEN_METADATA}
        meaning = {"huggingface": _features(noted)} if (noted := notes.get("huggingface")) is not None else {}
        return TableSpec(NAME, rows, {part.name: str(part.type) for part in schema}, nbytes, notes, meaning)

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        rows, taken = write_ipc(
            self._schema(), self._batches(), path, spec.nbytes, progress, self.path, ask, self.memory.write_through
        )
        if rows != spec.rows:
            raise damaged(self.path, f"it has {rows} rows, but its metadata states {spec.rows}")
        return taken

    def _schema(self) -> Any:
        raise NotImplementedError(f"{type(self).__name__} has no method _schema")

    def _close(self) -> None:
        # Otherwise Arrow's allocator keeps what decoding freed, and this process may go on to train.
        require("pyarrow", "parquet", phrase("tables")).default_memory_pool().release_unused()
        super()._close()


def _features(noted: Any) -> Any:
    """What datasets notes about columns, such as the names of classes: the same number may be another class."""
    try:
        return json.loads(noted)["info"]["features"]
    except (KeyError, TypeError, ValueError):
        return noted


def bytes_of_batch(batch: Any) -> int:
    """Bytes of a record batch. pyarrow's ``nbytes`` ends the process at a union without rows that was read."""
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    if any(arrow.types.is_union(kind) for part in batch.schema for kind in every_type(part.type)):
        return int(arrow.ipc.get_record_batch_size(batch))
    return int(batch.nbytes)


def selectable(batch: Any) -> Any:
    """The batch, with a copy of each column of which Arrow's ``take`` and ``filter`` would give other values.

    They do so for fixed-size lists in fixed-size lists where the column is a slice (pyarrow 26.0.1). The copy is none.
    """
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    odd = [_has_lists_in_lists(part.type) for part in batch.schema]
    if not any(odd):
        return batch
    columns = [arrow.concat_arrays([one]) if copy else one for one, copy in zip(batch.columns, odd, strict=True)]
    return type(batch).from_arrays(columns, schema=batch.schema)


@contextmanager
def selecting_rows() -> Iterator[None]:
    """Translate what pyarrow raises for a type that ``take`` and ``filter`` cannot select from."""
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    try:
        yield
    except arrow.ArrowNotImplementedError as problem:
        raise UnsupportedData(
            say("Arrow cannot select rows of these columns"),
            why=(str(problem).splitlines() or [type(problem).__name__])[0],
            fix=(say("omit it: columns=[…]"),),
        ) from problem


def _has_lists_in_lists(kind: Any) -> bool:
    is_list = require("pyarrow", "parquet", phrase("Arrow data")).types.is_fixed_size_list
    return any(is_list(one) and any(map(is_list, children(one))) for one in every_type(kind))


def write_ipc(
    schema: Any,
    batches: Iterable[Any],
    path: Path,
    most: int,
    progress: Progress,
    source: Path,
    ask: Progress = no_progress,
    through: bool = False,
) -> tuple[int, int]:
    """Write batches as an uncompressed Arrow IPC file; returns its rows and bytes.

    Space was reserved for ``most`` bytes. A source that holds more than its metadata states is damaged. ``through``:
    write through to the disk, because memory is short.
    """
    arrow = require("pyarrow", "parquet", phrase("tables"))
    options = arrow.ipc.IpcWriteOptions(compression=None, emit_dictionary_deltas=True)
    rows = reported = 0
    with arrow.PythonFile(WrittenThrough(str(path)), "w") if through else arrow.OSFile(str(path), "wb") as sink:
        with arrow.ipc.new_file(sink, schema, options=options) as writer:
            for batch in batches:
                ask(bytes_of_batch(batch))
                writer.write_batch(batch)
                rows += batch.num_rows
                del batch  # before the next one is read: memory was reserved for one
                if sink.tell() > most:
                    raise damaged(source, f"it holds more than the {most} bytes stated in its metadata")
                progress(sink.tell() - reported)
                reported = sink.tell()
        taken = sink.tell()
    progress(taken - reported)
    return rows, taken


@contextmanager
def arrow_errors(path: Path, doing: str) -> Iterator[None]:
    """Translate what pyarrow raises for a damaged or unsupported file into a SourceError."""
    try:
        yield
    except (LegroomError, MemoryError):
        raise
    except Exception as problem:
        text = (str(problem).splitlines() or [type(problem).__name__])[0]
        if isinstance(problem, OSError) and problem.errno:  # from the operating system: the file may be intact
            raise unreadable(path, problem) from problem
        if "launch worker thread" in text:
            raise MemoryError(text) from problem
        arrow = require("pyarrow", "parquet", phrase("tables"))
        if isinstance(problem, arrow.ArrowNotImplementedError):
            raise UnsupportedData(
                say("{path} cannot be read: {doing}", path=path, doing=doing),
                why=text,
                fix=(say("load only what you need: keys=[…]"),),
            ) from problem
        if "decrypt" in text.lower():
            raise UnsupportedData(
                say("{path} has encrypted columns", path=path),
                why=text,
                fix=(say("load the other columns: keys=[…]"), say("write it without encryption")),
            ) from problem
        raise damaged(path, f"{doing}: {text}") from problem


def batch_overhead(schema: Any) -> int:
    """Upper bound of a batch's bytes besides its buffers."""
    fields = sum(1 for part in schema for _ in every_type(part.type))
    return _BATCH + fields * (16 + 3 * _BUFFER)


def schema_bytes(schema: Any) -> int:
    """Bytes of the schema, which is stored twice: at the start and in the footer."""
    return 2 * int(schema.serialize().size)


def names_of_columns(schema: Any, path: Path) -> list[str]:
    """The names. Raises DamagedSource if one of them, or of a field in a column, is not UTF-8."""
    with arrow_errors(path, "the names of its columns"):
        for part in schema:
            for kind in every_type(part.type):
                _ = [field.name for field in _fields(kind)]
        names: list[str] = schema.names
        return names


def every_type(kind: Any) -> Iterator[Any]:
    """The type and all types nested in it."""
    yield kind
    for child in children(kind):
        yield from every_type(child)


def children(kind: Any) -> list[Any]:
    """The direct child types of a nested type."""
    if isinstance(kind, require("pyarrow", "parquet", phrase("Arrow data")).BaseExtensionType):
        return [kind.storage_type]
    return [field.type for field in _fields(kind)]


def _fields(kind: Any) -> list[Any]:
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    if isinstance(kind, arrow.BaseExtensionType) or arrow.types.is_dictionary(kind):
        return []
    return [kind.field(index) for index in range(kind.num_fields)]


def without_dictionaries(kind: Any) -> Any:
    """The type without dictionaries: an IPC file allows one per column, but each row group has its own."""
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    if arrow.types.is_dictionary(kind):
        return without_dictionaries(kind.value_type)
    if arrow.types.is_struct(kind):
        return arrow.struct([part.with_type(without_dictionaries(part.type)) for part in kind])
    for test, make in ((arrow.types.is_list, arrow.list_), (arrow.types.is_large_list, arrow.large_list)):
        if test(kind):
            return make(kind.value_field.with_type(without_dictionaries(kind.value_type)))
    return kind


def buffer_count(kind: Any) -> int | None:
    """How many buffers a column of that type has in an IPC batch; None if it depends on the data."""
    types = require("pyarrow", "parquet", phrase("Arrow data")).types
    if types.is_union(kind) or types.is_run_end_encoded(kind) or "view" in str(kind):
        return None
    inner = [buffer_count(child) for child in children(kind)]
    if None in inner:
        return None
    below = sum(count or 0 for count in inner)
    if isinstance(kind, require("pyarrow", "parquet", phrase("Arrow data")).BaseExtensionType):
        return below
    if types.is_null(kind):
        return 0
    if types.is_struct(kind) or types.is_fixed_size_list(kind):
        return 1 + below
    if types.is_nested(kind):  # lists, large lists, maps: validity and offsets
        return 2 + below
    varying = types.is_string(kind) or types.is_binary(kind) or types.is_large_string(kind)
    return 3 if varying or types.is_large_binary(kind) else 2


@dataclass(frozen=True, slots=True)
class LeafColumn:
    """What is known about one stored column."""

    entries: int
    data: int | None  # bytes of values of varying length; None: unknown


def column_bound(kind: Any, leaves: Iterator[LeafColumn]) -> int | None:
    """Upper bound of the bytes of a column of type ``kind``, drawing its leaves in order; None: unknown.

    Every element of a nested column is at least one entry of its leaf, so no level has more elements than the leaf has
    entries. Only fixed-size lists multiply: a null list takes the space of a full one.
    """
    taken, _ = _column_bound(kind, leaves, 1)
    return taken


def _column_bound(kind: Any, leaves: Iterator[LeafColumn], times: int) -> tuple[int | None, int]:
    """(bytes, entries)."""
    arrow = require("pyarrow", "parquet", phrase("Arrow data"))
    types = arrow.types
    if isinstance(kind, arrow.BaseExtensionType):
        return _column_bound(kind.storage_type, leaves, times)
    if types.is_nested(kind):
        inner = times * kind.list_size if types.is_fixed_size_list(kind) else times
        parts = [_column_bound(child, leaves, max(1, inner)) for child in children(kind)]
        if not parts or any(part is None for part, _ in parts):
            return None, 0
        entries = max(count for _, count in parts)
        own = _validity(entries * times) + (0 if types.is_struct(kind) else 8 * (entries * times + 1))
        return sum(part or 0 for part, _ in parts) + own, entries
    leaf = next(leaves)
    count = leaf.entries * times
    if types.is_null(kind):
        return 0, leaf.entries
    width = _bits(kind)
    if width is not None:
        return (count * width + 7) // 8 + _validity(count), leaf.entries
    if leaf.data is None:
        return None, leaf.entries
    return leaf.data + 16 * (count + 1) + _validity(count), leaf.entries  # offsets of 4 or 8, views of 16


def _validity(count: int) -> int:
    return (count + 7) // 8


def _bits(kind: Any) -> int | None:
    try:
        return int(kind.bit_width)
    except ValueError:  # strings and bytes
        return None
