"""The story of a run as one page that needs nothing else. Covers: text, tables and plots of every attempt.

Does not cover: the JSON beside it (report.py). Everything that came from the outside is escaped.
"""

from __future__ import annotations

import shlex
import time
from html import escape

from legroom.model.death import Attempt, Story
from legroom.rescue.because import ended, headline
from legroom.rescue.report_plot import plot
from legroom.units import format_duration, format_size
from legroom.words import language, say

_STYLE = """
:root { color-scheme: light dark; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 46rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2.5rem; }
code, pre { font: .85rem/1.45 ui-monospace, monospace; } pre { white-space: pre-wrap; overflow-wrap: anywhere; }
svg { width: 100%; height: auto; font: 11px system-ui, sans-serif; } svg text { fill: currentColor; }
table { border-collapse: collapse; } td, th { text-align: left; padding: .15rem 1rem .15rem 0; }
.verdict { border-left: 4px solid #d1495b; padding: .2rem 0 .2rem .8rem; } .fine { border-color: #2a9d5c; }
li { overflow-wrap: anywhere; }
"""


def page(story: Story) -> str:
    """The whole page."""
    body = [
        f"<h1>{escape(_title(story))}</h1>",
        f"<pre>{escape(shlex.join(story.command))}</pre>",
        f"<p>{escape(_when(story))}</p>",
    ]
    if story.stopped and story.verdict is not None:
        body.append(f"<p>{escape(say('Not started again: {why}.', why=story.stopped))}</p>")
    for attempt in story.attempts:
        body += _attempt(attempt)
    return (
        f'<!doctype html><html lang="{language()}"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(_title(story))}</title><style>{_STYLE}</style></head><body>{''.join(body)}</body></html>\n"
    )


def _title(story: Story) -> str:
    count = len(story.attempts)
    if story.verdict is None or story.attempts[-1].finished:
        return say("Finished after {count} attempts", count=count) if count > 1 else say("Finished")
    return say("Ended by {cause} after {count} attempts", cause=story.verdict.cause, count=count)


def _when(story: Story) -> str:
    began = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(story.began))
    took = format_duration(sum(attempt.seconds for attempt in story.attempts))
    return say(
        "Began {began}, ran {took}, in {isolation}.", began=began, took=took, isolation=story.isolation
    )


def _attempt(attempt: Attempt) -> list[str]:
    took = format_duration(attempt.seconds)
    parts = [f"<h2>{escape(say('Attempt {number}: {took}', number=attempt.number, took=took))}</h2>"]
    told = [*attempt.changed]
    if attempt.resumed_from:
        told.append(say("resumed from {path}", path=attempt.resumed_from))
    parts += [_list([*told, *attempt.notes]), f"<pre>{escape(shlex.join(attempt.command))}</pre>"]
    verdict = attempt.verdict
    if attempt.finished:
        parts.append(f'<p class="verdict fine">{escape(say("It finished."))}</p>')
    if verdict is not None:
        parts.append(
            f'<p class="verdict"><b>{escape(headline(verdict))}</b><br>{escape(verdict.summary)}</p>'
        )
        parts.append(_list(verdict.evidence or (ended(attempt.ending),)))
        parts.append(_list(tuple(f"{one.cause}: {one.why}" for one in verdict.likely)))
    parts.append(plot(attempt.readings, [alarm.since for alarm in attempt.alarms]))
    parts.append(_alarms(attempt))
    parts.append(_peaks(attempt))
    if verdict is not None and verdict.fix:
        parts += [f"<p>{escape(say('What to do'))}</p>", _steps(verdict.fix)]
    return parts


def _alarms(attempt: Attempt) -> str:
    """What was told while it lived, with the numbers that the plot has."""
    rows = []
    for number, alarm in enumerate(attempt.alarms, start=1):
        when = format_duration(alarm.since)
        words = (str(number), when, alarm.level, alarm.code, alarm.message)
        rows.append("<tr>" + "".join(f"<td>{escape(word)}</td>" for word in words) + "</tr>")
    return f"<table>{''.join(rows)}</table>" if rows else ""


def _peaks(attempt: Attempt) -> str:
    if not attempt.peaks:
        return ""
    rows = []
    for name, level in sorted(attempt.peaks.items()):
        used, size = (str(n) if name == "fds" else format_size(n) for n in (level.used, level.size))
        rows.append(
            f"<tr><td>{escape(name)}</td><td>{used}</td><td>{size}</td><td>{level.share:.0%}</td></tr>"
        )
    head = "".join(f"<th>{escape(word)}</th>" for word in (say("pool"), say("fullest"), say("size"), ""))
    return f"<table><tr>{head}</tr>{''.join(rows)}</table>"


def _steps(fix: tuple[str, ...]) -> str:
    """What to do; commands apart from the words, as they are typed."""
    items = []
    for step in fix:
        sentence, *commands = step.splitlines()
        typed = f"<pre>{escape(chr(10).join(commands))}</pre>" if commands else ""
        items.append(f"<li>{escape(sentence)}{typed}</li>")
    return f"<ul>{''.join(items)}</ul>"


def _list(lines: tuple[str, ...] | list[str]) -> str:
    return "<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else ""
