"""Divides the rows of an epoch among ranks and DataLoader workers, reads and shuffles them, and cuts them into batches.

No row is lost or given twice. All row groups end to end, in the epoch's order, form one range of rows. A rank gets one
contiguous part of it, so at most two of its groups are shared with a neighbour. A worker gets a part of its rank's, cut
at multiples of the batch size, so only the rank's last batch can be short, with any number of workers.

Batches have an exact size, and a position after each. Rows come as chunks. A chunk knows the position from which it
can be read again, and the position after it. So a position is the start of a chunk and the number of its rows that
were returned. A shuffle window is a chunk too: refilled from its position it holds the same rows, and its number gives
the same permutation. So a stream resumes exactly where it stopped without saving any rows.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any, NamedTuple

from legroom.errors import BudgetTooSmall
from legroom.formats.base_table_reader import bytes_of_batch, selectable, selecting_rows
from legroom.loader.rank_sampler import Uneven, permutation
from legroom.loader.stream.parquet_row_groups import ParquetSource
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


@dataclass(frozen=True, slots=True)
class StreamPosition:
    """A position between two rows of a shard; its fields are saved in state_dict."""

    piece: int = 0  # which piece of the shard
    at: int = 0  # rows from the beginning of its group, where reading starts
    skip: int = 0  # rows to leave out from there
    window: int = 0  # which window begins here, where rows are shuffled
    taken: int = 0  # rows of the chunk that begins here that have been returned


@dataclass(frozen=True, slots=True)
class RowChunk:
    """Some rows in the order in which they will be returned."""

    rows: Any  # a record batch
    nbytes: int  # of the buffers behind them: at least the bytes of the rows
    mark: StreamPosition
    after: StreamPosition
    order: Any = None  # a permutation of the rows, or None: as stored
    first: int = 0  # rows that have been returned already

    @property
    def left(self) -> int:
        return int(self.rows.num_rows) - self.first

    def part(self, first: int, count: int) -> Any:
        """``count`` of its rows from ``first`` on."""
        if self.order is None:
            return self.rows.slice(first, count)
        with selecting_rows():
            return self.rows.take(self.order.slice(first, count))


class BatchProgress(NamedTuple):
    """How much of a chunk has been returned. Made for every batch; the position is computed only on request."""

    mark: StreamPosition
    after: StreamPosition
    taken: int
    rows: int

    def position(self) -> StreamPosition:
        """Where to resume."""
        return replace(self.mark, taken=self.taken) if self.taken < self.rows else self.after


def dropped(chunks: Iterator[RowChunk], count: int) -> Iterator[RowChunk]:
    """The chunks without their first rows."""
    for chunk in chunks:
        gone = min(count, chunk.left)
        count -= gone
        if chunk.left > gone:
            yield replace(chunk, first=chunk.first + gone) if gone else chunk


def joined(parts: list[Any]) -> Any:
    """Record batches as one; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    import pyarrow

    table = pyarrow.Table.from_batches(parts)
    parts.clear()  # so that memory can be freed column by column
    (batch,) = table.combine_chunks().to_batches()
    return batch


def windows(
    chunks: Iterator[RowChunk], rows: int, nbytes: int, order: Callable[[int, int], Any], number: int
) -> Iterator[RowChunk]:
    """Shuffle windows: chunks of up to ``rows`` rows and ``nbytes`` bytes, each with its own order.

    ``order(window, rows)`` is the permutation; ``number`` the first window's.
    """
    waiting, first = next(chunks, None), None
    while waiting is not None:
        first = waiting.first if first is None else first
        # A part of a chunk begins where the chunk does, some rows further on.
        begin = replace(waiting.mark, skip=waiting.mark.skip + first, window=number)
        parts: list[Any] = []
        count = size = 0
        while waiting is not None and count < rows and (size < nbytes or not parts):
            first = waiting.first if first is None else first
            part = waiting.part(first, min(waiting.rows.num_rows - first, rows - count))
            parts.append(part)
            count, size, first = count + part.num_rows, size + bytes_of_batch(part), first + part.num_rows
            if first < waiting.rows.num_rows:
                end = replace(waiting.mark, skip=waiting.mark.skip + first)
            else:
                end, waiting, first = waiting.after, next(chunks, None), None
        number += 1
        order_here = order(number - 1, count)
        yield RowChunk(selectable(joined(parts)), size, begin, replace(end, window=number), order_here)


def window_order(*key: int) -> Callable[[int, int], Any]:
    """(window, rows) → a permutation that depends on them and on the key only."""

    def order(window: int, rows: int) -> Any:
        import numpy as np
        import pyarrow

        seed, epoch = np.random.SeedSequence((*key, window)).generate_state(2, np.uint64).tolist()
        return pyarrow.array(permutation(rows, seed, epoch))

    return order


def batches(
    chunks: Iterator[RowChunk],
    size: int,
    most: int,
    too_large: Callable[[int, int], BudgetTooSmall],
    *,
    drop_last: bool,
) -> Generator[tuple[Any, BatchProgress], None, None]:
    """Record batches of ``size`` rows, the last one as it comes, each with the progress after it.

    A batch that grows beyond ``most`` bytes raises ``too_large(rows so far, bytes so far)``.
    """
    parts: list[Any] = []
    rows = nbytes = 0
    for chunk in chunks:
        first, total = chunk.first, chunk.rows.num_rows
        small = chunk.nbytes <= most
        while first < total:
            if small and not parts and total - first >= size:  # the usual case, without a copy
                first += size
                yield chunk.part(first - size, size), BatchProgress(chunk.mark, chunk.after, first, total)
                continue
            part = chunk.part(first, min(total - first, size - rows))
            parts.append(part)
            first, rows, nbytes = first + part.num_rows, rows + part.num_rows, nbytes + chunk.nbytes
            # Counting bytes takes longer than slicing, so only where whole chunks would be too large.
            if nbytes > most and (exact := sum(map(bytes_of_batch, parts))) > most:
                raise too_large(rows, exact)
            if rows == size:
                batch, parts = joined(parts), []
                rows = nbytes = 0
                yield batch, BatchProgress(chunk.mark, chunk.after, first, total)
        last = BatchProgress(chunk.mark, chunk.after, total, total)
    if parts and not drop_last:
        yield joined(parts), last
