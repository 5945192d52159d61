"""Reading a shard's pieces one after the other.

Covers: opening each file when its turn comes and closing it after, cutting pieces out of groups, filtering, counting
the rows that pass. Does not cover: how a file is decoded (stream/parquet.py, stream/ipc.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from legroom.loader.stream.catalog import Catalog, Group
from legroom.loader.stream.flow import Chunk, Mark
from legroom.loader.stream.ipc import IpcSource
from legroom.loader.stream.parquet import ParquetSource
from legroom.loader.stream.room import Room
from legroom.loader.stream.shard import Piece
from legroom.loader.stream.step import Steps


class Reader:
    """The files of a catalog, one open at a time."""

    def __init__(
        self, catalog: Catalog, columns: Sequence[str], room: Room, batch_size: int, *, threads: bool
    ) -> None:
        self._catalog, self._columns, self._room, self._threads = catalog, columns, room, threads
        self._steps = Steps(room.step, batch_size, room.memory)
        self._number: int | None = None
        self._source: ParquetSource | IpcSource | None = None

    def rows(self, group: Group) -> Iterator[Any]:
        """All rows of a group, a step at a time."""
        return self.source(group.file).read(group.index, self._room)

    def source(self, number: int) -> ParquetSource | IpcSource:
        """That file, opened; the one before is closed."""
        if self._source is not None and self._number == number:
            return self._source
        self.close()
        file = self._catalog.files[number]
        file.require_unchanged()
        if file.kind == "parquet":
            self._source = ParquetSource(file.path, self._columns, self._steps, self._threads)
        else:
            self._source = IpcSource(file.path, self._columns, self._steps)
        self._number = number
        return self._source

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None


def read_pieces(
    reader: Reader, catalog: Catalog, pieces: Sequence[Piece], start: Mark, *, counted: bool
) -> Iterator[Chunk]:
    """The rows of the pieces as chunks, from ``start`` on.

    Pieces are counted in rows of the group, or, where ``counted``, in rows that pass the filter.
    """
    for number in range(start.piece, len(pieces)):
        piece = pieces[number]
        begin = max(piece.start, start.at) if number == start.piece else piece.start
        at = 0
        for step in reader.rows(catalog.groups[piece.group]):
            batch = catalog.condition.rows(step) if counted and catalog.condition else step
            first, last = max(begin - at, 0), min(piece.stop - at, batch.num_rows)
            place, at = at, at + batch.num_rows
            if first < last:
                batch = batch.slice(first, last - first)
                if catalog.condition and not counted:
                    batch = catalog.condition.rows(batch)
                done = place + last == piece.stop
                after = _beginning(pieces, number + 1) if done else Mark(number, place + last)
                picked = _picked(catalog, batch)
                # Of whole buffers: exact bytes would take fifty times as long, a percent or two of all decoding.
                yield Chunk(picked, picked.get_total_buffer_size(), Mark(number, place + first), after)
            if at >= piece.stop:
                break


def _beginning(pieces: Sequence[Piece], number: int) -> Mark:
    return Mark(number, pieces[number].start if number < len(pieces) else 0)


def _picked(catalog: Catalog, batch: Any) -> Any:
    """The columns asked for, in the order asked for, under the one schema of the stream."""
    if batch.schema.equals(catalog.schema, check_metadata=True):
        return batch
    arrays = [batch.column(name) for name in catalog.columns]
    return type(batch).from_arrays(arrays, schema=catalog.schema)


def count_rows(reader: Reader, catalog: Catalog) -> list[int]:
    """How many rows of each group pass the filter."""
    condition = catalog.condition
    if condition is None:
        return [group.rows for group in catalog.groups]
    return [sum(condition.rows(step).num_rows for step in reader.rows(group)) for group in catalog.groups]
