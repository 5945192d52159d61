"""Divides a stream's memory limit among decoding, batches and shuffle buffer, and returns freed memory to the system.

The limit is on the growth of the process. Arrow's pool may take less: libraries map code and tables at first use (about
16 MB), and an allocator keeps up to as much again as is in use. Both figures were measured, with unused memory of the
pool returned as described at ``DecodeSteps`` (docs/evidence/parquet-memory.md).
"""

from __future__ import annotations

import os
from bisect import bisect_left
from dataclasses import dataclass

from legroom.errors import BudgetTooSmall
from legroom.messages import say
from legroom.system.lazy_and_optional_imports import require
from legroom.units import exact_size, format_size

LIBRARIES = 16 << 20  # mapped by the first use of Arrow's readers
KEPT = 2  # times the bytes in use that an allocator keeps resident
# Bytes decoded at a time. A step has a fixed cost per stored column; larger steps than these are no faster.
_MOST_STEP = 8 << 20
_FEW_COLUMNS_STEP = 2 << 20
_COLUMN_STEP = 512 << 10
_LEAST_STEP = 64 << 10
_STEPS = 3  # in memory: the one being decoded, its filtered rows, and the last one, still held by a slice


@dataclass(frozen=True, slots=True)
class StreamDemand:
    """What a stream's rows take in memory, in bytes; None: the files do not contain it."""

    batch: int | None
    copies: int  # of a batch, at the moment it is returned
    window: int | None = 0  # the shuffle buffer when it is full
    columns: int = 16  # stored columns that are decoded side by side


@dataclass(frozen=True, slots=True)
class MemoryDivision:
    """The memory limit and its parts, in bytes."""

    demand: StreamDemand
    memory: int  # the limit, as given
    arrow: int  # what Arrow's pool may hold of it
    step: int  # decoded at a time
    batch: int  # the largest batch that may be returned
    window: int  # rows waiting in the shuffle buffer
    decode: int  # pages and dictionaries of the columns being read


def divide(memory: int, demand: StreamDemand) -> MemoryDivision:
    """Divide the limit; BudgetTooSmall where it is too small."""
    division = _divided(memory, demand)
    if division is None:
        raise too_small(memory, demand)
    return division


def _divided(memory: int, demand: StreamDemand) -> MemoryDivision | None:
    arrow = max(0, memory - LIBRARIES) // KEPT
    wanted = min(_MOST_STEP, max(_FEW_COLUMNS_STEP, demand.columns * _COLUMN_STEP))
    step = min(wanted, max(_LEAST_STEP, arrow // 16))
    most_batch = (arrow - _STEPS * step) // (demand.copies + 1)
    batch = most_batch if demand.batch is None else demand.batch
    if most_batch < _LEAST_STEP or batch > most_batch:
        return None
    free = arrow - _STEPS * step - demand.copies * batch
    # Filled in parts, then joined: for a moment the rows exist twice.
    window = free // 4 if demand.window is None else min(free // 4, demand.window)
    return MemoryDivision(demand, memory, arrow, step, most_batch, window, free - 2 * window)


def least_memory(demand: StreamDemand, decode: int = 0) -> int:
    """The smallest limit, in whole megabytes, that leaves ``decode`` bytes for decoding."""

    def enough(megabytes: int) -> bool:
        division = _divided(megabytes << 20, demand)
        return division is not None and division.decode >= decode

    return bisect_left(range(1 << 40), True, key=enough) << 20


def too_small(memory: int, demand: StreamDemand) -> BudgetTooSmall:
    """The error for a limit below what one batch needs."""
    return BudgetTooSmall(
        say("memory={memory} is too small for this stream", memory=format_size(memory)),
        why=say(
            "a batch takes {batch} and is needed {copies} times while one is made; Arrow's libraries take "
            "{libraries}, and its allocator as much again as the data",
            batch=say("at least 64 KB") if demand.batch is None else format_size(demand.batch),
            copies=demand.copies + 1,
            libraries=format_size(LIBRARIES),
        ),
        fix=(
            say("use at least memory={least!r}", least=exact_size(least_memory(demand))),
            say("or reduce batch_size or the number of columns"),
        ),
    )


def undecodable(where: str, needed: int, division: MemoryDivision, parts: str, fix: str) -> BudgetTooSmall:
    """The error for a group whose pages, dictionaries or batches cannot be decoded within the limit."""
    return BudgetTooSmall(
        say("{where} cannot be decoded within memory={memory}", where=where, memory=format_size(division.memory)),
        why=say(
            "it needs {needed} at once ({parts}); the limit leaves {left} for decoding",
            needed=format_size(needed),
            parts=parts,
            left=format_size(division.decode),
        ),
        fix=(
            say("use at least memory={least!r}", least=exact_size(least_memory(division.demand, needed))),
            say("or read fewer columns: columns=[…]"),
            fix,
        ),
    )


_MOST_ROWS = 1 << 16
_CHECKS = 32  # checks of the process's size per memory limit of decoded bytes


class DecodeSteps:
    """Chooses the rows of each step, and returns memory that Arrow's allocator keeps.

    What Arrow frees stays with its allocator: with strings, several times what is in use. mimalloc returns it on
    request, but returned memory must be faulted in again, which can cost as much as decoding. So it is returned only
    when the process has grown by half the limit, and then after each further quarter. Where the process's size cannot
    be read, the bytes decoded since the last return are used instead.
    """

    def __init__(self, nbytes: int, batch_size: int, memory: int) -> None:
        self._nbytes, self._batch_size, self._memory = nbytes, batch_size, memory
        self._pool = require("pyarrow", "parquet", "Parquet").default_memory_pool()
        self._since = 0
        size = resident()
        self._limit = None if size is None else size + memory // 2

    def rows(self, row_bytes: int) -> int:
        """Rows of a step: whole batches where several fit, so that few batches must be joined from two steps."""
        rows = max(1, min(_MOST_ROWS, self._nbytes // max(1, row_bytes)))
        return rows - rows % self._batch_size if rows > self._batch_size else rows

    def read(self, nbytes: int) -> None:
        """Count decoded bytes, and return memory where the process has grown too much."""
        self._since += nbytes
        if self._limit is None:
            if self._since > self._memory // 8:
                self._since = 0
                self._pool.release_unused()
        elif self._since > self._memory // _CHECKS:
            self._since = 0
            if (resident() or 0) > self._limit:
                self._pool.release_unused()
                # The rest is in use, or not Arrow's: only further growth is checked.
                self._limit = max(self._limit, (resident() or 0) + self._memory // 4)


def resident() -> int | None:
    """Resident bytes of this process; None where they cannot be read."""
    try:
        with open("/proc/self/statm", "rb", buffering=0) as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None
