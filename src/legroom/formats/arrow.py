"""Arrow IPC files, streams and Feather version 2 as one table.

Covers: plain and compressed batches, dictionaries, streams without an end mark. Does not cover: streams that
replace a dictionary on the way, which an IPC file cannot hold; they are refused.

``nbytes`` comes from the headers of the messages (arrow_messages.py), no values are read for it. Memory while
writing is that of all dictionaries and the largest batch in the file, compressed and not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from legroom.errors import UnsupportedData
from legroom.formats.arrow_messages import Layout, read_layout
from legroom.formats.arrow_types import FILE_OVERHEAD, batch_overhead, buffer_count, schema_bytes
from legroom.formats.protocol import ArraySpec, Description, TableSpec
from legroom.formats.selection import Selection
from legroom.formats.table import TableReader, arrow_trouble
from legroom.system.imports import require
from legroom.words import say


class ArrowReader(TableReader):
    """An Arrow IPC file or stream."""

    def __init__(self, path: Path, selection: Selection) -> None:
        super().__init__(path, selection)
        self._is_file = self._file.size >= 8 and self._file.read_at(0, 6) == b"ARROW1"
        self._names: list[str] = []
        self._memory_needed = 0
        try:
            self._arrow = require("pyarrow", "parquet", say("Arrow IPC"))
            with self._source() as source:
                self._whole_schema = source.schema
        except BaseException:
            self._file.close()
            raise

    def _source(self) -> Any:
        """pyarrow's reader; a file for itself, closed with it."""
        with arrow_trouble(self.path, say("its schema")):
            file = self._arrow.OSFile(self._file.alias, "rb")
            opener = self._arrow.ipc.open_file if self._is_file else self._arrow.ipc.open_stream
            return opener(file)

    def _look(self) -> Description:
        self._names = self._columns(self._whole_schema)
        layout = read_layout(self._file)
        if layout.replaced:
            raise UnsupportedData(
                say("{path} replaces a dictionary on the way", path=self.path),
                why=say("an IPC file, which can be mapped, holds one dictionary for a column"),
                fix=(say("rewrite it with unified dictionaries: pyarrow.Table.unify_dictionaries()"),),
            )
        largest = max((batch.decoding for batch in layout.batches), default=0)
        self._memory_needed = largest + sum(batch.decoding for batch in layout.dictionaries)
        with arrow_trouble(self.path, say("its schema")):
            spec = self._spec(self._schema(), layout.rows, self._bound(layout))
        name = "arrow" if self._is_file else "arrow-stream"
        return Description(name, (spec,), dict(spec.attributes), (self.path,))

    def _schema(self) -> Any:
        fields = [self._whole_schema.field(name) for name in self._names]
        return self._arrow.schema(fields, metadata=self._whole_schema.metadata)

    def _bound(self, layout: Layout) -> int:
        """The most the table takes: buffers of the columns asked for, where they can be told apart."""
        counts = [buffer_count(part.type) for part in self._whole_schema]
        total = sum(sum(batch.buffers) + batch.header for batch in layout.dictionaries)
        taken = set(self._names)
        for batch in layout.batches:
            total += batch.header
            if None in counts or sum(count or 0 for count in counts) != len(batch.buffers):
                total += sum(batch.buffers)
                continue
            at = 0
            for part, count in zip(self._whole_schema, counts, strict=True):
                if part.name in taken:
                    total += sum(batch.buffers[at : at + (count or 0)])
                at += count or 0
        messages = len(layout.batches) + len(layout.dictionaries)
        overhead = batch_overhead(self._whole_schema)
        return total + messages * overhead + schema_bytes(self._whole_schema) + FILE_OVERHEAD

    def _decoding(self, spec: ArraySpec | TableSpec) -> int:
        return self._memory_needed

    def _batches(self) -> Iterator[Any]:
        with self._source() as source:
            for index in range(source.num_record_batches) if self._is_file else iter(int, 1):
                with arrow_trouble(self.path, say("its batches")):
                    if self._is_file:
                        batch = source.get_batch(index)
                    else:
                        try:
                            batch = source.read_next_batch()
                        except StopIteration:
                            return
                    # Offsets and indices come from the file: writing follows them.
                    batch.validate(full=True)
                    batch = batch.select(self._names)
                yield batch
                del batch  # before the next is read
