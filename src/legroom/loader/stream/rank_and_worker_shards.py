"""Divides the rows of an epoch among ranks and DataLoader workers, without overlap or loss, and reads them.

All row groups end to end, in the epoch's order, form one range of rows. A rank gets one contiguous part of it, so at
most two of its groups are shared with a neighbour. A worker gets a part of its rank's, cut at multiples of the batch
size, so only the rank's last batch can be short, with any number of workers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

from legroom.loader.rank_sampler import Uneven, permutation
from legroom.loader.stream.parquet_row_groups import ParquetSource
from legroom.loader.stream.shuffle import RowChunk, StreamPosition
from legroom.loader.stream.stream_files import Catalog, IpcSource, RowGroup
from legroom.loader.stream.stream_memory import DecodeSteps, MemoryDivision


@dataclass(frozen=True, slots=True)
class ShardPiece:
    """Some consecutive rows of one group."""

    group: int  # its number in the catalog
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A DataLoader worker of a rank."""

    rank: int = 0
    world_size: int = 1
    worker: int = 0
    workers: int = 1


def epoch_order(groups: int, seed: int, epoch: int, shuffle: bool) -> list[int]:
    """The groups in the order in which the epoch reads them."""
    if not shuffle:
        return list(range(groups))
    order: list[int] = permutation(groups, seed, epoch).tolist()
    return order


def rank_range(rows: int, rank: int, world_size: int, uneven: Uneven) -> tuple[int, int]:
    """The rank's part of all rows; with ``pad`` it may run past the end, where it wraps around."""
    if uneven == "all":
        return rows * rank // world_size, rows * (rank + 1) // world_size
    each = rows // world_size if uneven == "drop" else -(-rows // world_size)
    return rank * each, (rank + 1) * each


def worker_range(start: int, stop: int, worker: int, workers: int, batch_size: int, drop_last: bool) -> tuple[int, int]:
    """The worker's part of its rank's rows, in whole batches."""
    batches = batch_count(stop - start, batch_size, drop_last)
    first, end = batches * worker // workers, batches * (worker + 1) // workers
    return start + first * batch_size, min(stop, start + end * batch_size)


def batch_count(rows: int, batch_size: int, drop_last: bool) -> int:
    """The number of batches in these rows."""
    return rows // batch_size if drop_last else -(-rows // batch_size)


def pieces(sizes: Sequence[int], order: Sequence[int], start: int, stop: int) -> list[ShardPiece]:
    """The rows [start, stop) as pieces of row groups; past the end it wraps around."""
    ends = list(accumulate((sizes[group] for group in order), initial=0))
    total = ends[-1]
    found: list[ShardPiece] = []
    while start < stop and total:
        at = start % total
        index = bisect_right(ends, at) - 1
        group, first = order[index], at - ends[index]
        size = min(sizes[group] - first, stop - start)
        found.append(ShardPiece(group, first, first + size))
        start += size
    return found


class ShardReader:
    """Reads the files of a catalog, one open at a time."""

    def __init__(
        self, catalog: Catalog, columns: Sequence[str], division: MemoryDivision, batch_size: int, *, threads: bool
    ) -> None:
        self._catalog, self._columns, self._division, self._threads = catalog, columns, division, threads
        self._steps = DecodeSteps(division.step, batch_size, division.memory)
        self._number: int | None = None
        self._opened = ExitStack()
        self._source: ParquetSource | IpcSource | None = None

    def rows(self, group: RowGroup) -> Iterator[Any]:
        """All rows of a group, a step at a time."""
        return self.source(group.file).read(group.index, self._division)

    def source(self, number: int) -> ParquetSource | IpcSource:
        """Open that file, and close the one before."""
        if self._source is not None and self._number == number:
            return self._source
        self.close()
        file = self._catalog.files[number]
        file.require_unchanged()
        path = self._opened.enter_context(file.local())
        if file.kind == "parquet":
            self._source = ParquetSource(path, self._columns, self._steps, self._threads)
        else:
            self._source = IpcSource(path, self._columns, self._steps)
        self._number = number
        return self._source

    def close(self) -> None:
        if self._source is not None:
            self._source.close()
            self._source = None
        self._opened.close()


def read_pieces(
    reader: ShardReader, catalog: Catalog, pieces: Sequence[ShardPiece], start: StreamPosition, *, counted: bool
) -> Iterator[RowChunk]:
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
            begin_at, at = at, at + batch.num_rows
            if first < last:
                batch = batch.slice(first, last - first)
                if catalog.condition and not counted:
                    batch = catalog.condition.rows(batch)
                done = begin_at + last == piece.stop
                after = _start_of(pieces, number + 1) if done else StreamPosition(number, begin_at + last)
                selected = _selected(catalog, batch)
                # Bytes of whole buffers: exact bytes take fifty times as long, 1-2 % of the decoding time.
                yield RowChunk(
                    selected, selected.get_total_buffer_size(), StreamPosition(number, begin_at + first), after
                )
            if at >= piece.stop:
                break


def _start_of(pieces: Sequence[ShardPiece], number: int) -> StreamPosition:
    return StreamPosition(number, pieces[number].start if number < len(pieces) else 0)


def _selected(catalog: Catalog, batch: Any) -> Any:
    """The selected columns in their order, with the schema of the stream."""
    if batch.schema.equals(catalog.schema, check_metadata=True):
        return batch
    arrays = [batch.column(name) for name in catalog.columns]
    return type(batch).from_arrays(arrays, schema=catalog.schema)


def count_rows(reader: ShardReader, catalog: Catalog) -> list[int]:
    """How many rows of each group pass the filter."""
    condition = catalog.condition
    if condition is None:
        return [group.rows for group in catalog.groups]
    return [sum(condition.rows(step).num_rows for step in reader.rows(group)) for group in catalog.groups]
