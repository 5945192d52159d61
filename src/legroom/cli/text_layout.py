"""Layout of output: wrapping to the terminal's width, findings, bars of memory pools, colours; or one JSON object."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import click

from legroom.cli.help import columns_of
from legroom.cli.language_and_streams import for_drawing, line_width
from legroom.messages import cells, cut, fill, right, say, shown, step_indent, step_label
from legroom.records.finding_and_alarm import Finding, Severity, heading
from legroom.records.machine import Pool, RuntimeEnvironment
from legroom.units import format_size, size_or_unknown

_LONGEST_WORD = 56
_COLOURS = {"critical": "red", "warning": "yellow", "info": "cyan"}


def print_result(as_json: bool, schema: str, content: Callable[[], Mapping[str, Any]], text: Callable[[], str]) -> None:
    """Print a result as one JSON object of this schema, or as text."""
    if not as_json:
        click.echo(text())
        return
    import json

    click.echo(json.dumps({"schema": f"legroom.{schema}/1", **content()}, ensure_ascii=False))


def coloured() -> bool:
    """Colours only on a terminal, and never against NO_COLOR."""
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")


def width() -> int:
    """The columns to write in: the terminal's, at most 100; 80 where there is none."""
    return line_width(columns_of(sys.__stdout__))


def paint(text: str, severity: Severity | None = None, *, bold: bool = False) -> str:
    """The text in its severity's colour, where colours are on."""
    if not coloured():
        return text
    # Not False: click writes "bold off" for that, which the streams do not let through.
    return click.style(text, fg=_COLOURS.get(severity or ""), bold=bold or None)


def paragraph(text: str, first: str, rest: str) -> str:
    """The text wrapped to the width; commands are never broken at a hyphen or inside a word."""
    return fill(text, width(), first, rest)


def row(text: str) -> str:
    """A line of a list: wrapped on a terminal, and whole elsewhere, where a search should find all of it."""
    if not sys.stdout.isatty():
        return text
    indent = text[: len(text) - len(text.lstrip(" "))]
    return paragraph(text.lstrip(" "), indent, indent + "  ")


def labelled(label: str, text: str) -> str:
    """A paragraph that hangs on its label: ``  why: …``."""
    return paragraph(text, label, " " * cells(label))


def steps(fix: Iterable[str]) -> list[str]:
    """Fixes in order: a wrapped sentence, then its commands, each on a line of its own."""
    lines, indent = [], step_indent()
    for step in fix:
        sentence, *commands = step.splitlines()
        lines.append(paragraph(sentence, step_label(step), indent))
        lines += [indent + command for command in commands]
    return lines


def shorten(line: str) -> str:
    """One line, cut at the width with an ellipsis."""
    return cut(line, width())


def elide(text: str) -> str:
    """Shorten long words in the middle: cgroup paths run to hundreds of characters.

    Chinese has no spaces, so Chinese text does not count as a long word.
    """
    return re.sub(
        rf"[^\s\u2e80-\uffef]{{{_LONGEST_WORD + 1},}}",
        lambda word: f"{word[0][: _LONGEST_WORD // 3]}…{word[0][-_LONGEST_WORD * 2 // 3 :]}",
        text,
    )


def runtime_line(runtime: RuntimeEnvironment) -> str:
    """Where this runs, and with which rights."""
    told = say("{kind} ({how}), {rights}", kind=runtime.kind, how=runtime.how, rights=runtime.rights_how)
    return paragraph(told, "", "  ")


def process_lines(rows: Sequence[tuple[int, int | None, int | None, str]], most: int) -> list[str]:
    """Processes in /dev/shm, each as its id, its bytes there, its RssShmem and its command."""
    lines = []
    for pid, shm, rss, command in rows[:most]:
        figures = say("{pid:>9}  {shm:>8}, RssShmem {rss}  ",
                      pid=pid, shm=format_size(shm or 0), rss=right(size_or_unknown(rss), 8))  # fmt: skip
        lines.append(shorten(f"{figures}{command}"))
    if len(rows) > most:
        lines.append("  " + say("and {count} more", count=len(rows) - most))
    return lines


Draw = Callable[[object, str, int, int | None], None]


@contextmanager
def progress_bars() -> Iterator[Draw | None]:
    """Draws a bar for each key on stderr: its label, what is done, and of how much; None where it is no terminal."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    name = TextColumn("{task.description}", markup=False)  # a file may be named [red] or [/b]
    columns = (name, BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(file=for_drawing(sys.stderr)), transient=True) as drawn:
        tasks: dict[object, Any] = {}

        def draw(key: object, label: str, done: int, total: int | None) -> None:
            if key not in tasks:
                tasks[key] = drawn.add_task(shown(label), total=total)
            drawn.update(tasks[key], completed=done, total=total)

        yield draw


def finding_lines(finding: Finding) -> list[str]:
    """A finding: its severity and code, what it is, why, and the fixes."""
    return [
        f"{paint(heading(finding.severity), finding.severity, bold=True)} {finding.code}",
        paragraph(finding.message, "  ", "  "),
        labelled(say("  why: "), elide(finding.why)),
        *steps(finding.fix),
    ]


YELLOW, RED = 0.8, 0.95  # shares of a pool in use from which its bar has that colour
BAR = 20


def bar(share: float) -> str:
    """A share as a bar of twenty cells; at least one cell for anything above zero."""
    share = min(1.0, max(0.0, share))
    full = round(share * BAR)
    if share > 0 and full == 0:
        full = 1
    blocks = "█░" if (sys.stdout.encoding or "").lower().startswith("utf") else "#."
    return blocks[0] * full + blocks[1] * (BAR - full)


def pool_line(pool: Pool, plain: bool) -> str:
    """One memory pool on one line; for an unknown one the reason."""
    label = f"  {pool.name:<7}"
    share = pool.used_share
    if pool.size is None:
        return labelled(label, say("unknown: {reason}", reason=pool.reason or pool.source))
    if pool.size == 0:
        return label + say("none")
    if pool.name == "fds":
        return label + say("{size} open files per process", size=pool.size)
    if share is None or pool.used is None or pool.free is None:
        known = say("{size} in total", size=format_size(pool.size))
        if pool.free is not None:
            known = say("{free} of {size} free", free=format_size(pool.free), size=format_size(pool.size))
        return labelled(label, say("{what}; {source}", what=known, source=pool.reason or pool.source))
    severity: Severity | None = "critical" if share >= RED else "warning" if share >= YELLOW else None
    figures = say(
        "{used:>8} of {size:>8} used, {free} free",
        used=format_size(pool.used), size=format_size(pool.size), free=format_size(pool.free),
    )  # fmt: skip
    if plain:
        line = label + say("{share:.0%} used: ", share=share) + " ".join(figures.split())
    else:
        line = label + paint(bar(share), severity) + f" {share:>4.0%} {figures}"
    rest = pool.size - pool.used - pool.free
    if pool.name == "disk" and rest > pool.size // 100:
        reserved = say("the file system keeps {rest} back: for root, or because of a quota", rest=format_size(rest))
        line += "\n" + labelled(" " * len(label), reserved)
    return line
