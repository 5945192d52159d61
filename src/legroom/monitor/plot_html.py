"""A story as one page that needs nothing else. Covers: the chart, peaks, alarms and marks in words. No scripts."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence

from legroom.monitor.chart_svg import amount, chart, text_of
from legroom.monitor.course import Dot
from legroom.monitor.story import Story
from legroom.units import format_duration
from legroom.words import language, say

_STYLE = """
:root{color-scheme:light dark;--ink:#1d2733;--soft:#5b6775;--line:#d5dbe2;--paper:#fff}
@media (prefers-color-scheme:dark){:root{--ink:#e4e9ef;--soft:#9aa7b5;--line:#37424f;--paper:#12181f}}
body{font:15px/1.5 system-ui,-apple-system,"Segoe UI",sans-serif;color:var(--ink);background:var(--paper);
margin:0 auto;padding:16px;max-width:1000px}
h1{font-size:1.3rem;margin:0}h2{font-size:1.05rem;margin:1.6rem 0 .4rem}p{margin:.2rem 0;color:var(--soft)}
.wide{overflow-x:auto}.wide svg{display:block;width:100%;min-width:560px}
table{border-collapse:collapse;width:100%}
th,td{text-align:left;padding:.3rem .8rem .3rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.n{white-space:nowrap;font-variant-numeric:tabular-nums}
"""


def page(story: Story) -> str:
    """The page."""
    sample = story.sample
    began = story.began or 0.0
    watched = sample.watched if sample else ""
    lasted = max(0.0, sample.when - began) if sample else 0.0
    start = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began))
    pools = story.dots()
    spells = story.spells()
    heading = say("A watch of {what}", what=watched)
    about = say("From {start}, for {time}.", start=start, time=format_duration(lasted))
    return "".join(
        [
            f'<!doctype html><html lang="{language()}"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width,initial-scale=1">',
            '<meta http-equiv="Content-Security-Policy" content="default-src \'none\';style-src \'unsafe-inline\'">',
            f"<title>{text_of(heading)}</title><style>{_STYLE}</style></head><body><main>",
            f"<h1>{text_of(heading)}</h1><p>{text_of(about)}</p>",
            f'<div class="wide">{chart(pools, story.marks, spells)}</div>',
            _table(
                say("Pools"),
                (say("pool"), say("size"), say("most used"), say("share"), say("when")),
                (_peak(name, dots, began) for name, dots in pools.items()),
            ),
            _table(
                say("Alarms"),
                (say("when"), say("lasted"), say("level"), say("code"), say("message")),
                (
                    (
                        _since(spell.since, began),
                        say("until the end") if spell.until is None else format_duration(spell.until - spell.since),
                        spell.level,
                        spell.code,
                        spell.message,
                    )
                    for spell in spells
                ),
            ),
            _table(say("Marks"), (say("when"), say("mark")), ((_since(m.when, began), m.text) for m in story.marks)),
            "</main></body></html>\n",
        ]
    )  # fmt: skip


def _peak(name: str, dots: Sequence[Dot], began: float) -> tuple[str, ...]:
    known = [dot for dot in dots if dot.used is not None]
    if not known:
        return name, say("unknown"), say("unknown"), "", ""
    most = max(known, key=lambda dot: dot.used or 0)
    size, share = most.size, most.share
    return (
        name,
        say("unknown") if size is None else amount(name, size),
        amount(name, most.used or 0),
        say("unknown") if share is None else f"{share * 100:.0f} %",
        _since(most.when, began),
    )


def _since(when: float, began: float) -> str:
    return format_duration(max(0.0, when - began)) if when > began else "0 s"


def _table(heading: str, names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = list(rows)
    if not lines:
        return f"<h2>{text_of(heading)}</h2><p>{text_of(say('none'))}</p>"
    head = "".join(f'<th scope="col">{text_of(name)}</th>' for name in names)
    body = "".join(
        "<tr>"
        + "".join(
            f"<td{'' if place == len(line) - 1 else ' class=n'}>{text_of(cell)}</td>"
            for place, cell in enumerate(line)
        )
        + "</tr>"
        for line in lines
    )
    return (
        f"<h2>{text_of(heading)}</h2><div class=wide><table><thead><tr>{head}</tr></thead>"
        f"<tbody>{body}</tbody></table></div>"
    )
