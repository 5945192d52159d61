"""Reads Arrow IPC files, Feather version 2 and Arrow streams in small steps, and releases mapped pages after reading.

Rows are copied out of the map and never returned as views of it: a batch that a consumer keeps would keep the whole
map, and mapped pages count as resident memory until they are released. The file must not be truncated meanwhile.
Feather version 1 and streams that are not files are not supported.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from legroom.formats.arrow_reader import BatchSizes, read_layout
from legroom.formats.file_reads_and_errors import SourceFile
from legroom.formats.table_reader import arrow_errors, buffer_count
from legroom.loader.stream.stream_memory import DecodeSteps, MemoryDivision, undecodable
from legroom.messages import phrase, say
from legroom.system.lazy_and_optional_imports import require

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
                self._steps.read(part.nbytes)
                self._release_pages(part.nbytes)
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

    return batch.take(pyarrow.array(np.arange(batch.num_rows)))
