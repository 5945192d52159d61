"""How a stream's memory bound is divided.

Covers: pure arithmetic from the bound to what decoding, batches and the shuffle buffer may take, and the error for a
bound that is too small. Does not cover: measuring what a file needs (formats/parquet_reader.py, stream/ipc.py).

The bound is on what the process grows by. Arrow's pool may take less than that: libraries map code and tables when
they are first used (about 16 MB), and an allocator keeps up to about as much again as is in use at a time. Both
figures were measured (docs/evidence/parquet-memory.md), with the pool's unused memory given back as it goes.
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.errors import BudgetTooSmall
from legroom.units import exact_size, format_size
from legroom.words import say

LIBRARIES = 16 << 20  # what first use of Arrow's readers maps
KEPT = 2  # an allocator's resident memory over what is in use
# Decoding holds a step about three times. What one costs beside its bytes, it costs for each stored column: larger
# steps than these are no faster.
_MOST_STEP = 8 << 20
_FEW_COLUMNS_STEP = 2 << 20
_COLUMN_STEP = 512 << 10
_LEAST_STEP = 64 << 10
_STEPS = 3  # the one being decoded, what a filter lets through of it, and the last one, still held by a slice


@dataclass(frozen=True, slots=True)
class Demand:
    """What a stream's rows will take, in bytes, as far as the files say (None: they do not)."""

    batch: int | None
    copies: int  # of a batch, at the moment it is handed out
    window: int | None = 0  # the shuffle buffer when it is full
    columns: int = 16  # stored columns that are decoded side by side


@dataclass(frozen=True, slots=True)
class Room:
    """The bound and its parts, in bytes."""

    demand: Demand
    memory: int  # the bound, as given
    arrow: int  # what Arrow's pool may hold of it
    step: int  # decoded at a time
    batch: int  # the largest batch that may be handed out
    window: int  # rows waiting in the shuffle buffer
    decode: int  # pages and dictionaries of the columns being read


def divide(memory: int, demand: Demand) -> Room:
    """Share the bound out, or say that it is too small."""
    room = _divided(memory, demand)
    if room is None:
        raise too_small(memory, demand)
    return room


def _divided(memory: int, demand: Demand) -> Room | None:
    arrow = max(0, memory - LIBRARIES) // KEPT
    wanted = min(_MOST_STEP, max(_FEW_COLUMNS_STEP, demand.columns * _COLUMN_STEP))
    step = min(wanted, max(_LEAST_STEP, arrow // 16))
    most_batch = (arrow - _STEPS * step) // (demand.copies + 1)
    batch = most_batch if demand.batch is None else demand.batch
    if most_batch < _LEAST_STEP or batch > most_batch:
        return None
    free = arrow - _STEPS * step - demand.copies * batch
    # Filled in pieces, then joined: for a moment the rows are there twice.
    window = free // 4 if demand.window is None else min(free // 4, demand.window)
    return Room(demand, memory, arrow, step, most_batch, window, free - 2 * window)


def least_memory(demand: Demand, decode: int = 0) -> int:
    """The smallest bound, in whole megabytes, that leaves so much for decoding."""
    low, high = 0, 1
    while not _enough(high, demand, decode):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _enough(middle, demand, decode) else (middle, high)
    return high << 20


def _enough(megabytes: int, demand: Demand, decode: int) -> bool:
    room = _divided(megabytes << 20, demand)
    return room is not None and room.decode >= decode


def too_small(memory: int, demand: Demand) -> BudgetTooSmall:
    """The error for a bound below what one batch needs."""
    return BudgetTooSmall(
        say("memory={memory} is too small for this stream", memory=format_size(memory)),
        why=say(
            "a batch takes {batch}, room for {copies} of them is needed to make one and hand it out, and Arrow's "
            "libraries and allocator take {libraries} and as much again as the data",
            batch=say("at least 64 KB") if demand.batch is None else format_size(demand.batch),
            copies=demand.copies + 1,
            libraries=format_size(LIBRARIES),
        ),
        fix=(
            say("give it at least memory={least!r}", least=exact_size(least_memory(demand))),
            say("or make batches smaller: a lower batch_size, or fewer columns"),
        ),
    )


def undecodable(where: str, needed: int, room: Room, parts: str, fix: str) -> BudgetTooSmall:
    """The error for a group whose pages, dictionaries or batches cannot be decoded within the bound."""
    return BudgetTooSmall(
        say("{where} cannot be decoded within memory={memory}", where=where, memory=format_size(room.memory)),
        why=say(
            "it needs {needed} at once ({parts}); the bound leaves {left} for decoding",
            needed=format_size(needed),
            parts=parts,
            left=format_size(room.decode),
        ),
        fix=(
            say("give it at least memory={least!r}", least=exact_size(least_memory(room.demand, needed))),
            say("or read fewer columns: columns=[…]"),
            fix,
        ),
    )
