"""Every pool up to a death, as one SVG.

Covers: drawing readings, and when alarms were raised. Does not cover: the page around it (report_html.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from legroom.model.death import Reading
from legroom.units import format_duration
from legroom.words import say

WIDTH, HEIGHT = 720, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 44, 90, 12, 26
# Told apart by colour, by dash and by the name at the line's end: no one of them alone is enough for everybody.
_LINES = {
    "shm": ("#d1495b", ""),
    "ram": ("#2e6f95", ""),
    "swap": ("#8a6d3b", "6 3"),
    "fds": ("#6a4c93", "2 3"),
}
_LABEL = 34  # as wide as two numbers
_CARD = ("#2a9d5c", "8 3 2 3")


def plot(readings: Sequence[Reading], alarms: Sequence[float] = ()) -> str:
    """How full each pool was, in percent, over the attempt's life; empty where nothing was read.

    ``alarms`` are seconds since the start; each is drawn with its number in the row.
    """
    names = sorted({name for reading in readings for name in reading.levels})
    if not names:
        return ""
    span = max(readings[-1].when, 0.1)
    about = say("How full each pool was over time")
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(about)}">',
        *_grid(span),
        *_raised(alarms, span),
    ]
    labels: list[tuple[float, str, str]] = []
    for name in names:
        colour, dash = _LINES.get(name, _CARD)
        points = [(r.when, r.levels[name].share) for r in readings if name in r.levels]
        path = " ".join(f"{_x(when, span):.1f},{_y(share):.1f}" for when, share in points)
        dashes = f' stroke-dasharray="{dash}"' if dash else ""
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>')
        labels.append((_y(points[-1][1]), name, colour))
    return "".join([*parts, *_labels(labels), "</svg>"])


def _grid(span: float) -> list[str]:
    lines = []
    for percent in (0, 50, 100):
        y = _y(percent / 100)
        lines.append(
            f'<line x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{y}" y2="{y}" stroke="currentColor" opacity=".2"/>'
        )
        lines.append(f'<text x="{_LEFT - 6}" y="{y + 4}" text-anchor="end">{percent} %</text>')
    for part in (0.0, 0.5, 1.0):
        label = escape(format_duration(span * part))
        lines.append(
            f'<text x="{_x(span * part, span):.0f}" y="{HEIGHT - 8}" text-anchor="middle">{label}</text>'
        )
    return lines


def _raised(alarms: Sequence[float], span: float) -> list[str]:
    """A line for each alarm with its number on top; those too near each other for that share one label."""
    lines, groups = [], list[tuple[float, int, int]]()  # where a label is, its first and last number
    for number, when in enumerate(alarms, start=1):
        x = _x(when, span)
        lines.append(
            f'<line x1="{x:.0f}" x2="{x:.0f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" stroke="#e08e0b" '
            'stroke-dasharray="3 3"/>'
        )
        if groups and x - groups[-1][0] < _LABEL:
            groups[-1] = (groups[-1][0], groups[-1][1], number)
        else:
            groups.append((x, number, number))
    for x, first, last in groups:
        text = str(first) if first == last else f"{first}–{last}"
        lines.append(f'<text x="{x:.0f}" y="{_TOP - 2}" text-anchor="middle">{text}</text>')
    return lines


def _labels(labels: list[tuple[float, str, str]]) -> list[str]:
    """Names at the lines' ends, pushed apart where they would lie on each other."""
    placed, lowest = [], float(_TOP)
    for y, name, colour in sorted(labels):
        y = max(y, lowest)
        lowest = y + 14
        placed.append(
            f'<text x="{WIDTH - _RIGHT + 8}" y="{y + 4:.1f}" fill="{colour}" font-weight="600">{escape(name)}</text>'
        )
    return placed


def _x(when: float, span: float) -> float:
    return _LEFT + (WIDTH - _LEFT - _RIGHT) * min(1.0, when / span)


def _y(share: float) -> float:
    return _TOP + (HEIGHT - _TOP - _BOTTOM) * (1 - min(1.0, max(0.0, share)))
