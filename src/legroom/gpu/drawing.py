"""The curve of a batch-size search, drawn.

Covers: one SVG picture, without any plotting library. Does not cover: the search (finder.py).
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from legroom.model.gpu import BatchFound
from legroom.units import format_size
from legroom.words import say

_WIDE, _HIGH, _LEFT, _EDGE = 640, 360, 90, 40


def plot(found: BatchFound, path: str | Path | None = None) -> str:
    """The trials of a batch finder, the line through them and the bound, as SVG.

    Args:
        found: What ``find_batch_size`` gave.
        path: A file to write the picture to, too.
    """
    text = _svg(found)
    if path is not None:
        Path(path).write_text(text, encoding="utf-8")
    return text


def _svg(found: BatchFound) -> str:
    right = max(trial.batch for trial in found.trials) * 1.05
    top = max([found.bound, *(peak for _, peak in found.curve)]) * 1.05

    def x(batch: float) -> float:
        return round(_LEFT + (_WIDE - _LEFT - _EDGE) * batch / right, 1)

    def y(size: float) -> float:
        return round(_HIGH - _EDGE - (_HIGH - 2 * _EDGE) * max(0.0, size) / top, 1)

    def level(size: int, colour: str, words: str) -> list[str]:
        return [
            f'<line x1="{_LEFT}" x2="{_WIDE - _EDGE}" y1="{y(size)}" y2="{y(size)}" stroke="{colour}" '
            'stroke-dasharray="6 4"/>',
            f'<text x="{_LEFT + 6}" y="{y(size) - 5}" fill="{colour}">{escape(words)}</text>',
        ]

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE} {_HIGH}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{_WIDE}" height="{_HIGH}" fill="white"/>',
        f'<path d="M{_LEFT} {_EDGE}V{_HIGH - _EDGE}H{_WIDE - _EDGE}" fill="none" stroke="#333"/>',
        *level(found.bound, "#b00020", say("bound {size}", size=format_size(found.bound))),
        *level(found.cap, "#b26a00", say("less {share:.0%}: {size}", share=found.margin, size=format_size(found.cap))),
        f'<line x1="{x(0)}" y1="{y(found.predicted(0))}" x2="{x(right)}" y2="{y(found.predicted(round(right)))}" '
        'stroke="#1565c0"/>',
    ]  # fmt: skip
    for trial in found.trials:
        if trial.fits and trial.peak is not None:
            parts.append(f'<circle cx="{x(trial.batch)}" cy="{y(trial.peak)}" r="4" fill="#1565c0"/>')
        else:
            at, place = x(trial.batch), y(trial.peak if trial.peak is not None else found.cap)
            parts.append(f'<path d="M{at - 4} {place - 4}l8 8m0 -8l-8 8" stroke="#b00020" stroke-width="2"/>')
        parts.append(
            f'<text x="{x(trial.batch)}" y="{_HIGH - _EDGE + 16}" text-anchor="middle">{trial.batch}</text>'
        )
    title = say(
        "batch {batch}: {size} of {bound}",
        batch=found.largest, size=format_size(found.predicted(found.largest)), bound=format_size(found.bound),
    )  # fmt: skip
    parts.append(f'<text x="{_LEFT}" y="20" font-weight="bold">{escape(title)}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
