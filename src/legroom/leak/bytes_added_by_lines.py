"""Which lines of the source fill a holder, and how much each of them adds, as far as it was seen.

A window of tracemalloc saw which lines made the newest items. The source tells which line adds what such a line makes.
"""

from __future__ import annotations

import linecache
import re
from collections.abc import Sequence

from legroom.leak.lines_that_fill_containers import line_that_added, lines_for, passing_lines
from legroom.leak.record_files import CreatedItems, HolderRecord
from legroom.leak.user_source_files import is_user_file
from legroom.records.memory_growth import SourceLine

_ENTRY = re.compile(r"\['(\w+)'\](?:\[…\])?$")  # of log['loss']


def lines_of(holder: HolderRecord) -> tuple[SourceLine, ...]:
    """Where the source fills the holder."""
    if holder.line is not None:
        return (SourceLine(holder.file, holder.line),)
    itself = holder.unit in ("nodes", "bytes")
    source = "".join(linecache.getlines(holder.file))
    entry = _ENTRY.search(holder.name)
    key = None if entry is None else entry[1]
    found = lines_for(source, holder.word, holder.function, itself=itself, entry=key)
    if not found and itself:
        found = lines_for(source, holder.word, holder.function, entry=key)
    if not found:
        found = passing_lines(source, holder.word)
    return tuple(SourceLine(holder.file, number) for number in found)


def shares_of_lines(
    holder: HolderRecord, lines: Sequence[SourceLine], pool: str, *, graph: bool
) -> dict[SourceLine, float]:
    """How much of the newest items' bytes, or of their graphs, each line adds, as far as it was seen."""

    def amount(items: CreatedItems) -> int:
        return items.graphs if graph else items.pools.get(pool, 0)

    total = sum(amount(items) for items in (*holder.created, *holder.unknown))
    shares: dict[SourceLine, float] = {}
    for items in holder.created:
        line = _line_that_added(holder, items, lines)
        if line is not None and total > 0 and amount(items):
            shares[line] = shares.get(line, 0.0) + amount(items) / total
    return shares


def _line_that_added(holder: HolderRecord, items: CreatedItems, lines: Sequence[SourceLine]) -> SourceLine | None:
    frames = [number for file, number in ((items.file, items.line), *items.through) if file == holder.file]
    source = "".join(linecache.getlines(holder.file))
    number = line_that_added(source, [one.line for one in lines], frames)
    return None if number is None else SourceLine(holder.file, number)


def items_made(
    holder: HolderRecord, pool: str, lines: Sequence[SourceLine], *, graph: bool, line: SourceLine | None
) -> list[CreatedItems]:
    """What was seen to be made of its items, the largest first; only what that line added, where one is given."""
    made = [one for one in holder.created if line is None or _line_that_added(holder, one, lines) == line]
    users = [one for one in made if is_user_file(one.file)] or made
    amounts: dict[tuple[str, int], tuple[int, int, int]] = {}
    for one in users:
        bytes_before, graphs, count = amounts.get((one.file, one.line), (0, 0, 0))
        amounts[one.file, one.line] = bytes_before + one.pools.get(pool, 0), graphs + one.graphs, count + 1

    def rank(one: CreatedItems) -> tuple[int, int, int, int]:
        size, graphs, count = amounts[one.file, one.line]
        return -graphs if graph else 0, -size, -count, one.line

    return sorted(users, key=rank)
