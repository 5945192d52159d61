"""How the demo's words and table lie in the columns of a screen. Covers: wrapping, aligning. Decides nothing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from legroom.cli.layout import elide, width
from legroom.columns import cells, fill, left, right
from legroom.words import say

if TYPE_CHECKING:
    from legroom.demo.table import Row

_GAP = 2
_NARROWEST = 16  # columns for the notes: with less, figures stand under each other


def wrapped(label: str, text: str) -> list[str]:
    """The text hanging on its label."""
    return fill(elide(text), width(), label, " " * cells(label)).split("\n")


def table_lines(rows: Sequence[Row], columns: int) -> list[str]:
    """Columns where there is room for them, else one figure after the other."""
    heads = (say("measured just now"), say("without"), "Legroom")
    figures = [heads, *((row.what, row.without, row.with_us) for row in rows)]
    first, second, third = (max(map(cells, column)) for column in zip(*figures, strict=True))
    taken = first + second + third + 3 * _GAP
    if columns - taken < _NARROWEST:
        return [line for row in rows for line in _stacked(row, heads)]
    gap = " " * _GAP
    lines = []
    for cell, note in zip(figures, ["", *(row.note for row in rows)], strict=True):
        begun = gap.join((left(cell[0], first), right(cell[1], second), right(cell[2], third), ""))
        lines += fill(note, columns, begun, " " * taken).split("\n") if note else [begun.rstrip()]
    return [lines[0], "-" * max(map(cells, lines)), *lines[1:]]


def _stacked(row: Row, heads: tuple[str, str, str]) -> list[str]:
    figures = (f"  {heads[1]}: {row.without}", f"  {heads[2]}: {row.with_us}")
    return [row.what, *figures, *([f"  {row.note}"] if row.note else [])]
