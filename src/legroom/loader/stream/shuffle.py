"""From rows as they are read to batches: the shuffle buffer and batches of exact size, with a position after each.

Rows come as chunks. A chunk knows the position from which it can be read again, and the position after it. So a
position is the start of a chunk and the number of its rows that were returned. A shuffle window is a chunk too:
refilled from its position it holds the same rows, and its number gives the same permutation. So a stream resumes
exactly where it stopped without saving any rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from legroom.errors import BudgetTooSmall
from legroom.loader.rank_sampler import permutation


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
            count, size, first = count + part.num_rows, size + part.nbytes, first + part.num_rows
            if first < waiting.rows.num_rows:
                end = replace(waiting.mark, skip=waiting.mark.skip + first)
            else:
                end, waiting, first = waiting.after, next(chunks, None), None
        number += 1
        order_here = order(number - 1, count)
        yield RowChunk(joined(parts), size, begin, replace(end, window=number), order_here)


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
) -> Iterator[tuple[Any, BatchProgress]]:
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
            if nbytes > most and (exact := sum(one.nbytes for one in parts)) > most:
                raise too_large(rows, exact)
            if rows == size:
                batch, parts = joined(parts), []
                rows = nbytes = 0
                yield batch, BatchProgress(chunk.mark, chunk.after, first, total)
        last = BatchProgress(chunk.mark, chunk.after, total, total)
    if parts and not drop_last:
        yield joined(parts), last
