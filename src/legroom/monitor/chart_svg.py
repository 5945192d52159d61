"""Pools over time as one SVG picture that needs nothing else.

Covers: a panel for each pool on one scale of time, marks and alarms in it, light and dark. Does not cover: gathering
(story.py), pages around it (plot_html.py, and the report of a rescued run).

``chart`` takes plain dots: (time in seconds, used, size) for each pool, where None is not known. Times may be of the
day's clock or count from anything; the scale begins at the first.
"""

from __future__ import annotations

import html
import re
from collections.abc import Mapping, Sequence

from legroom.model import Mark
from legroom.monitor.chart_scale import Scale, clear_of, scale_of
from legroom.monitor.course import Dot
from legroom.monitor.story import Spell
from legroom.units import format_size
from legroom.words import say

_LEFT, _RIGHT, _TOP, _FOOT = 138, 64, 40, 30
_PANEL, _GAP, _LINE = 88, 22, 18
_MOST_TOLD = 12  # alarms in words under the panels
_LETTER = 6.4  # of a label, in pixels
# What XML may not hold: a process can be called anything.
_NOT_TEXT = re.compile("[\x00-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]")
_COUNTED = frozenset({"fds"})  # pools that are not bytes

STYLE = """
.lr-chart{--ink:#1d2733;--soft:#5b6775;--line:#d5dbe2;--fill:#1f6fb2;--warn:#b25e00;--bad:#c02434;--paper:#fff;
font:12px system-ui,-apple-system,"Segoe UI",sans-serif;background:var(--paper);color:var(--ink)}
@media (prefers-color-scheme:dark){.lr-chart{--ink:#e4e9ef;--soft:#9aa7b5;--line:#37424f;--fill:#5aa9e6;
--warn:#f0a030;--bad:#ff6b78;--paper:#12181f}}
.lr-chart text{fill:var(--ink)}
.lr-chart text.soft{fill:var(--soft);font-size:11px}
.lr-chart .name{font-weight:600;font-size:14px}
.lr-chart .grid{stroke:var(--line);stroke-width:1}
.lr-chart .mark{stroke:var(--soft);stroke-width:1;stroke-dasharray:2 3}
.lr-chart .used{fill:none;stroke:var(--fill);stroke-width:1.8;stroke-linejoin:round}
.lr-chart .area{fill:var(--fill);opacity:.13}
.lr-chart .peak{fill:var(--fill)}
.lr-chart .warning{fill:var(--warn)}
.lr-chart .critical{fill:var(--bad)}
.lr-chart .spell{opacity:.16}
.lr-chart text.number{fill:var(--paper);font-size:10px;font-weight:700;text-anchor:middle}
"""


def chart(
    pools: Mapping[str, Sequence[Dot]],
    marks: Sequence[Mark] = (),
    spells: Sequence[Spell] = (),
    *,
    width: int = 900,
    label: str = "",
) -> str:
    """The picture; one of a few words where there is nothing to draw."""
    drawn = {name: dots for name, dots in pools.items() if dots}
    if not drawn:
        return _frame(width, 60, [f'<text x="20" y="34">{text_of(say("nothing was seen"))}</text>'], label)
    times = [dot.when for dots in drawn.values() for dot in (dots[0], dots[-1])]
    scale = scale_of(min(times), max(times), _LEFT, width - _RIGHT)
    bottom = _TOP + len(drawn) * (_PANEL + _GAP) - _GAP
    told = list(enumerate(spells, 1))[:_MOST_TOLD]
    parts: list[str] = []
    for place, (name, dots) in enumerate(drawn.items()):
        top = _TOP + place * (_PANEL + _GAP)
        parts += _panel(name, dots, scale, top)
        parts += [
            part
            for number, spell in told
            if spell.pool in (name, None)
            for part in _spell(number, spell, scale, top)
        ]
    parts += _marks(marks, scale, bottom)
    parts += _times(scale, bottom)
    parts += _words(told, len(spells), scale, bottom + _FOOT + _LINE)
    lines = len(told) + (len(spells) > len(told))
    return _frame(width, bottom + _FOOT + (lines * _LINE + 12 if lines else 0), parts, label)


def text_of(words: str) -> str:
    """Words as the text of a page or picture, or as the value of an attribute of one."""
    return html.escape(_NOT_TEXT.sub("\ufffd", words))


def amount(pool: str, count: int) -> str:
    """So much of that pool, in words."""
    return str(count) if pool in _COUNTED else format_size(count)


def _frame(width: int, height: int, parts: list[str], label: str) -> str:
    words = text_of(label or say("How full each pool was over time"))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="lr-chart" viewBox="0 0 {width} {height}" role="img"'
        f' aria-label="{words}"><title>{words}</title><style>{STYLE}</style>'
        f'<rect width="{width}" height="{height}" style="fill:var(--paper)"/>' + "".join(parts) + "</svg>"
    )


def _panel(name: str, dots: Sequence[Dot], scale: Scale, top: int) -> list[str]:
    shares = [(dot, dot.share) for dot in dots]
    known = [(dot, share) for dot, share in shares if share is not None]
    parts = [f'<text class="name" x="12" y="{top + 16}">{text_of(name)}</text>']
    for percent in (0, 50, 100):
        y = _y(percent / 100, top)
        parts.append(
            f'<line class="grid" x1="{scale.left}" x2="{scale.right}" y1="{y:.1f}" y2="{y:.1f}"/>'
            f'<text class="soft" x="{scale.left - 6}" y="{y + 4:.1f}" text-anchor="end">{percent} %</text>'
        )
    if not known:
        middle = (scale.left + scale.right) / 2
        word = text_of(say("unknown"))
        return [
            *parts,
            f'<text class="soft" x="{middle:.0f}" y="{top + 48}" text-anchor="middle">{word}</text>',
        ]
    size = known[-1][0].size
    parts.append(
        f'<text class="soft" x="12" y="{top + 34}">{text_of(say("of {size}", size=amount(name, size or 0)))}</text>'
    )
    for run in _runs(shares):
        path = " ".join(f"{scale.x(when):.1f},{_y(share, top):.1f}" for when, share in run)
        first, last, floor = scale.x(run[0][0]), scale.x(run[-1][0]), _y(0, top)
        parts.append(
            f'<polygon class="area" points="{first:.1f},{floor:.1f} {path} {last:.1f},{floor:.1f}"/>'
        )
        if len(run) == 1:
            parts.append(f'<circle class="peak" cx="{first:.1f}" cy="{_y(run[0][1], top):.1f}" r="2"/>')
        parts.append(f'<polyline class="used" points="{path}"/>')
    return [*parts, *_peak(name, known, scale, top)]


def _peak(name: str, known: Sequence[tuple[Dot, float]], scale: Scale, top: int) -> list[str]:
    """The highest dot, and its figure at the right edge, where no line runs."""
    dot, share = max(known, key=lambda one: one[1])
    x, y = scale.x(dot.when), _y(share, top)
    used = amount(name, dot.used or 0)
    told = say("peak {used} at {time}", used=used, time=scale.words(dot.when))
    return [
        f'<circle class="peak" cx="{x:.1f}" cy="{y:.1f}" r="3.5"><title>{text_of(told)}</title></circle>',
        f'<text x="{scale.right + 6}" y="{max(y + 4, top + 9):.1f}">{share * 100:.0f} %</text>',
        f'<text class="soft" x="12" y="{top + 50}">{text_of(say("peak {used}", used=used))}</text>',
    ]


def _spell(number: int, spell: Spell, scale: Scale, top: int) -> list[str]:
    """An alarm as a band with its number on top; the words are under the panels."""
    x = scale.x(spell.since)
    wide = max(2.0, scale.x(scale.last if spell.until is None else spell.until) - x)
    told = text_of(f"{spell.level} {spell.code}: {spell.message}")
    return [
        f'<g><title>{told}</title><rect class="spell {spell.level}" x="{x:.1f}" y="{top}" width="{wide:.1f}"'
        f' height="{_PANEL}"/><circle class="{spell.level}" cx="{x:.1f}" cy="{top}" r="7.5"/>'
        f'<text class="number" x="{x:.1f}" y="{top + 3.5}">{number}</text></g>'
    ]


def _marks(marks: Sequence[Mark], scale: Scale, bottom: int) -> list[str]:
    """A line for each, and its words where the one before leaves room."""
    seen = sorted(
        (mark for mark in marks if scale.first <= mark.when <= scale.last), key=lambda one: one.when
    )
    parts = []
    free = clear_of(scale.right + _RIGHT)
    for mark in seen:
        x, text = scale.x(mark.when), mark.text if len(mark.text) <= 24 else mark.text[:23] + "…"
        parts.append(
            f'<line class="mark" x1="{x:.1f}" x2="{x:.1f}" y1="{_TOP - 12}" y2="{bottom}">'
            f"<title>{text_of(mark.text)}</title></line>"
        )
        if free(x, len(text) * _LETTER + 10):
            parts.append(f'<text class="soft" x="{x + 2:.1f}" y="{_TOP - 16}">{text_of(text)}</text>')
    return parts


def _times(scale: Scale, bottom: int) -> list[str]:
    return [
        f'<text class="soft" x="{scale.x(when):.1f}" y="{bottom + 18}" text-anchor="middle">{text_of(words)}</text>'
        for when, words in scale.ticks()
    ]


def _words(told: Sequence[tuple[int, Spell]], count: int, scale: Scale, top: int) -> list[str]:
    parts = []
    longest = int((scale.right + _RIGHT - 40) / _LETTER)
    for place, (number, spell) in enumerate(told):
        y = top + place * _LINE
        text = say(
            "{time} {level} {code}: {message}",
            time=scale.words(spell.since), level=spell.level, code=spell.code, message=spell.message,
        )  # fmt: skip
        text = text if len(text) <= longest else text[: longest - 1] + "…"
        parts.append(
            f'<circle class="{spell.level}" cx="19" cy="{y - 4}" r="7.5"/>'
            f'<text class="number" x="19" y="{y - 0.5}">{number}</text><text x="34" y="{y}">{text_of(text)}</text>'
        )
    if count > len(told):
        more = say("and {count} more", count=count - len(told))
        parts.append(f'<text class="soft" x="34" y="{top + len(told) * _LINE}">{text_of(more)}</text>')
    return parts


def _runs(shares: Sequence[tuple[Dot, float | None]]) -> list[list[tuple[float, float]]]:
    """The stretches without a gap."""
    runs: list[list[tuple[float, float]]] = [[]]
    for dot, share in shares:
        if share is not None:
            runs[-1].append((dot.when, share))
        elif runs[-1]:
            runs.append([])
    return [run for run in runs if run]


def _y(share: float, top: int) -> float:
    return top + _PANEL * (1 - min(1.0, max(0.0, share)))
