"""What the readers of tables share: choosing columns, and writing record batches to an Arrow IPC file.

Covers: uncompressed IPC files that can be mapped, written a batch at a time. Does not cover: where batches
come from (parquet.py, arrow.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

from legroom.errors import LegroomError, UnsupportedData
from legroom.formats.attributes import as_json
from legroom.formats.base import BaseReader
from legroom.formats.protocol import ArraySpec, Extent, Progress, TableSpec, no_progress
from legroom.formats.selection import Selection, column_names
from legroom.formats.source import SourceFile, damaged, unreadable
from legroom.system.imports import require
from legroom.words import say

NAME = "table"  # the file has no name for the one table it holds
_SILENT = {b"ARROW:schema"}  # the schema itself, encoded


class TableReader(BaseReader):
    """A file that is one table."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._file = SourceFile(path)

    def _library_errors(self, doing: str) -> AbstractContextManager[None]:
        return arrow_trouble(self.path, doing)

    def _batches(self) -> Iterator[Any]:
        """Record batches with the columns asked for, checked so that writing them is safe."""
        raise NotImplementedError

    def _columns(self, schema: Any) -> list[str]:
        """The columns asked for, by their own names or below ``table``, which alone means all."""
        with arrow_trouble(self.path, say("the names of its columns")):
            names: list[str] = schema.names
        double = {name for name in names if names.count(name) > 1}
        if double:
            raise UnsupportedData(
                say("{path} has two columns named {name!r}", path=self.path, name=min(double)),
                why=say("a table is a mapping of names to columns"),
                fix=(say("rename one of them"),),
            )
        taken = self.selection.columns(NAME, names)
        self.selection.check(column_names(NAME, taken), names, self.path)
        return taken

    def _spec(self, schema: Any, rows: int, nbytes: int) -> TableSpec:
        metadata = schema.metadata or {}
        notes = {as_json(key): as_json(value) for key, value in metadata.items() if key not in _SILENT}
        return TableSpec(NAME, rows, {part.name: str(part.type) for part in schema}, nbytes, notes)

    def _read(self, spec: ArraySpec, out: Any, progress: Progress) -> None:
        raise NotImplementedError  # no arrays here; BaseReader refuses before this

    def _extent(self, spec: ArraySpec) -> Extent | None:
        raise NotImplementedError

    def _write(self, spec: TableSpec, path: Path, progress: Progress, ask: Progress) -> int:
        rows, taken = write_ipc(self._schema(), self._batches(), path, spec.nbytes, progress, self.path, ask)
        if rows != spec.rows:
            raise damaged(
                self.path, say("{rows} rows where {promised} were promised", rows=rows, promised=spec.rows)
            )
        return taken

    def _schema(self) -> Any:
        raise NotImplementedError

    def descriptors(self) -> list[int]:
        """Of its file."""
        return [self._file.fileno()]

    def _close(self) -> None:
        # What decoding freed stays with Arrow's allocator otherwise, and whoever builds an entry goes on to train.
        require("pyarrow", "parquet", say("tables")).default_memory_pool().release_unused()
        self._file.close()


def write_ipc(
    schema: Any,
    batches: Iterable[Any],
    path: Path,
    most: int,
    progress: Progress,
    source: Path,
    ask: Progress = no_progress,
) -> tuple[int, int]:
    """Write batches as an uncompressed Arrow IPC file; returns its rows and bytes.

    Room was reserved for ``most`` bytes: a file whose metadata promised less than it holds is damaged.
    """
    arrow = require("pyarrow", "parquet", say("tables"))
    options = arrow.ipc.IpcWriteOptions(compression=None, emit_dictionary_deltas=True)
    rows = told = 0
    with arrow.OSFile(str(path), "wb") as sink:
        with arrow.ipc.new_file(sink, schema, options=options) as writer:
            for batch in batches:
                ask(batch.nbytes)
                writer.write_batch(batch)
                rows += batch.num_rows
                del batch  # before the next is read: one at a time is what was counted
                if sink.tell() > most:
                    raise damaged(
                        source, say("it holds more than the {most} bytes its metadata promise", most=most)
                    )
                progress(sink.tell() - told)
                told = sink.tell()
        taken = sink.tell()
    progress(taken - told)
    return rows, taken


@contextmanager
def arrow_trouble(path: Path, doing: str) -> Iterator[None]:
    """Turn whatever pyarrow says about a file that breaks its rules into one error."""
    try:
        yield
    except (LegroomError, MemoryError):
        raise
    except Exception as problem:
        text = (str(problem).splitlines() or [type(problem).__name__])[0]
        if isinstance(problem, OSError) and problem.errno:  # of the system: it proves nothing about the file
            raise unreadable(path, problem) from problem
        if "launch worker thread" in text:
            raise MemoryError(text) from problem
        arrow = require("pyarrow", "parquet", say("tables"))
        if isinstance(problem, arrow.ArrowNotImplementedError):
            raise UnsupportedData(
                say("{path} cannot be read: {doing}", path=path, doing=doing),
                why=text,
                fix=(say("leave the column out: name those you need with keys=[…]"),),
            ) from problem
        raise damaged(path, say("{doing}: {text}", doing=doing, text=text)) from problem
