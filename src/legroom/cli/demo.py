"""`legroom demo`: its options, its display while it runs, and the table at the end."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from legroom.cli.language_and_streams import for_drawing, remark_text
from legroom.cli.text_layout import elide, width
from legroom.errors import EXIT_USAGE
from legroom.messages import cells, fill, left, listed, right, say
from legroom.units import format_duration, format_size, size_or_unknown

if TYPE_CHECKING:
    from rich.text import Text

    from legroom.demo.demo_stages import Child, Screen
    from legroom.records.machine import Pool

Row = tuple[str, ...]  # what, without Legroom, with it, a note
_LINE_EVERY, _DRAW_EVERY = 4.0, 0.25  # seconds
_NAME, _PROGRESS = 10, 46  # columns
_NARROWEST = 16  # columns for the notes of the table: with less, figures stand below each other
_NONE = "-"


@click.command()
@click.option("--quick", is_flag=True, help="Use less data and fewer rounds: faster, with less precise figures.")
@click.option(
    "--out",
    metavar="FILE",
    help="File for the chart, ending in .png or .svg (default: ./legroom-demo.png, or .svg without matplotlib).",
)
@click.option("--keep", is_flag=True, help="Keep the directory with data, logs and checkpoints.")
@click.option("--no-torch", is_flag=True, help="Train with numpy and leave out the DataLoaders.")
@click.option("--plain", is_flag=True, help="Print plain lines even on a terminal.")
@click.option("--no-color", is_flag=True, help="Use no colors.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout; progress goes to stderr.")
def command(
    quick: bool, out: str | None, keep: bool, no_torch: bool, plain: bool, no_color: bool, as_json: bool
) -> int:
    """Show what Legroom does, measured on this machine in about a minute.

    Runs torch's DataLoader and Legroom's with a 64 MB /dev/shm. Then runs four
    training jobs twice: first each job has its own copy of the data, then all
    share one copy. Kills one of these jobs and resumes it. At the end
    prints a table, writes a chart and removes all its other files.
    """
    from legroom.charts.demo_chart import demo_chart
    from legroom.charts.drawing import render
    from legroom.demo.demo_stages import run_demo
    from legroom.system.atomic_file import replace_file

    path = chart_path(out)
    result = run_demo(lambda: _screen(as_json, plain, no_color), quick=quick, torch=not no_torch, keep=keep)
    chart, unwritten = render(demo_chart(result), path.suffix.lower()), None
    try:
        replace_file(path, chart)
    except OSError as problem:  # the disk is full, or the directory is gone: what was measured is printed all the same
        unwritten = say("cannot write {path}: {why}", path=path, why=problem.strerror or problem)
    if as_json:
        click.echo(json.dumps({**result, "picture": None if unwritten else str(path)}, ensure_ascii=False))
        return _status(unwritten)
    click.echo()
    for line in table_lines(table_rows(result), width()):
        click.echo(line)
    click.echo()
    if unwritten is None:
        click.echo(say("took {seconds:.0f} s; chart: {path}", seconds=result["seconds"], path=path))
    if result["kept"] is not None:
        click.echo(say("kept: {path}", path=result["kept"]))
    return _status(unwritten)


def _status(unwritten: str | None) -> int:
    """The exit status; says first why the chart is missing."""
    if unwritten is None:
        return 0
    click.echo(remark_text(unwritten), err=True)
    return EXIT_USAGE


def chart_path(asked: str | None) -> Path:
    """The file to draw: the given one, or one in this directory, or in the one for temporary files."""
    import importlib.util
    import tempfile

    from legroom.charts.drawing import check_path

    if asked is not None:
        return check_path(Path(asked).absolute(), (".png", ".svg"))
    kind = ".png" if importlib.util.find_spec("matplotlib") is not None else ".svg"
    folder = Path.cwd() if os.access(".", os.W_OK) else Path(tempfile.gettempdir())
    return folder / f"legroom-demo{kind}"


# While it runs.


def _screen(as_json: bool, plain: bool, no_color: bool) -> Screen:
    utf = (sys.stdout.encoding or "").lower().startswith("utf")
    if as_json or plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or not utf:
        return Lines(lambda line: click.echo(line, err=as_json))
    colour = not no_color and not os.environ.get("NO_COLOR")
    return Bars(colour=colour, to=for_drawing(sys.stdout))


def stamped(clock: float, text: str) -> list[str]:
    """The text beside its time, wrapped to the width of the screen."""
    stamp = say("{clock:>4.0f} s  ", clock=clock)
    return fill(elide(text), width(), stamp, " " * cells(stamp)).split("\n")


class Lines:
    """Events as lines, with a line of figures every few seconds: for logs and screen readers."""

    def __init__(self, write: Callable[[str], object]) -> None:
        self._write, self._due = write, _LINE_EVERY

    def headline(self, clock: float, title: str) -> None:
        self._write("")
        self._write(title)
        self._due = clock + _LINE_EVERY

    def tell(self, clock: float, text: str) -> None:
        for line in stamped(clock, text):
            self._write(line)

    def draw(self, clock: float, pools: Sequence[Pool], children: Sequence[Child]) -> None:
        if clock >= self._due and children:
            self._due = clock + _LINE_EVERY
            self.tell(clock, figures(pools, children))

    def close(self) -> None:
        """Nothing to close."""


class Bars:
    """Bars at the bottom of a terminal and events above them, by rich; without a thread of rich's."""

    def __init__(self, *, colour: bool, to: Any = None) -> None:
        from rich.console import Console
        from rich.live import Live

        self._due = 0.0
        self._console = Console(file=to, highlight=False, no_color=not colour)
        self._live = Live(console=self._console, auto_refresh=False, transient=True)
        self._live.start()

    def headline(self, clock: float, title: str) -> None:
        self._console.print()
        self._console.print(title, style="bold", markup=False)

    def tell(self, clock: float, text: str) -> None:
        for line in stamped(clock, text):
            self._console.print(line, markup=False, soft_wrap=True)

    def draw(self, clock: float, pools: Sequence[Pool], children: Sequence[Child]) -> None:
        from rich.console import Group

        if clock >= self._due:
            self._due = clock + _DRAW_EVERY
            self._live.update(Group(*bar_lines(pools, children, self._console.width)), refresh=True)

    def close(self) -> None:
        self._live.stop()


def figures(pools: Sequence[Pool], children: Sequence[Child]) -> str:
    """Progress and memory in one line."""
    parts = [say("{name} {share:.0%}", name=child.name, share=_share(child) or 0.0) for child in children]
    held = [child.pss for child in children if child.pss is not None]
    if held:
        size = format_size(sum(held))
        parts.append(say("together {size}", size=size) if len(held) > 1 else say("memory {size}", size=size))
    for pool in pools:
        if pool.used is not None and pool.size:
            used, size = format_size(pool.used), format_size(pool.size)
            parts.append(say("{pool} {used} of {size}", pool=pool.name, used=used, size=size))
    return listed(parts)


def bar_lines(pools: Sequence[Pool], children: Sequence[Child], columns: int) -> list[Text]:
    """Pools, and the progress and memory of every child."""
    from rich.text import Text

    from legroom.monitor.tui_lines import pool_line

    lines = [Text("")]
    for pool in pools:
        lines.append(pool_line(pool, (), "critical" if (pool.used_share or 0.0) >= 0.95 else None, columns))
    if children:
        heads = left(say("progress"), 25) + right(say("step"), 13) + right(say("loss"), 8)
        memory = right("PSS", 10) + right("RSS", 10)
        lines.append(Text(" " * _NAME + heads + memory, style="dim", no_wrap=True))
    lines += [_child_line(child) for child in children]
    held = [child.pss for child in children if child.pss is not None]
    if len(held) > 1:
        label = left(say("together (PSS counts shared memory once)"), _NAME + _PROGRESS)
        lines.append(Text(f"{label}{format_size(sum(held)):>10}", style="dim", no_wrap=True))
    for line in lines:
        line.truncate(columns)
    return lines


def _child_line(child: Child) -> Text:
    from rich.text import Text

    from legroom.monitor.tui_lines import bar

    line = Text(no_wrap=True).append(left(child.name, _NAME), style="bold")
    share, progress = _share(child), child.last("step")
    if share is None or progress is None or child.note is not None:
        style = "dim" if child.note is None else "bold yellow"
        line.append(left(child.note or say("starting"), _PROGRESS), style=style)
    else:
        line.append(bar(share, 18), style="cyan").append(f" {share * 100:>4.0f}% ")
        line.append(f"{progress['step']:>6} / {progress['of']:<5}")
        line.append(f"{progress['loss']:>7.2f}" if "loss" in progress else " " * 7)
    sizes = ("" if size is None else format_size(size) for size in (child.pss, child.rss))
    return line.append("".join(f"{size:>10}" for size in sizes))


def _share(child: Child) -> float | None:
    step = child.last("step")
    return None if step is None else float(step["step"] / step["of"])


# The table.


def table_rows(result: Mapping[str, Any]) -> list[Row]:
    """Every comparison; the note of one that was not measured gives the reason."""
    count, opening, rescue = len(result["trainings"]), result["opening"], result["rescue"]
    separate, shared = result["memory"]["separate"], result["memory"]["shared"]
    if separate is None or shared is None:
        note = say("the runs could not be measured together")
    else:
        note = say("{times} times less (PSS)", times=ratio(separate / shared))
        programs = shared - result["data_bytes"]
        if programs > result["data_bytes"]:  # few data: the ratio says little about the runs of a user
            note = say("{note}; {size} of both are Python and {engine}, not data",
                       note=note, size=format_size(programs), engine=result["engine"])  # fmt: skip
    sizes = (size_or_unknown(size) for size in (separate, shared))
    rows: list[Row] = [(say("memory of {count} training runs", count=count), *sizes, note)]
    at_once = (format_duration(opening[key]) for key in ("plain_at_once", "at_once"))
    note = say("one run loads, the others wait for it")
    rows.append((say("{count} runs have data after", count=count), *at_once, note))
    plain = format_duration(opening["plain"])
    if opening["later"] is None:
        rows.append((say("a later run has data after"), plain, _NONE, say("no run started later")))
    else:
        note = say("{ready} with every page mapped", ready=format_duration(opening["later_ready"]))
        rows.append((say("a later run has data after"), plain, format_duration(opening["later"]), note))
    rows += _loader_rows(result)
    note = say("{verdict}, not memory; resumed from step {step} of {steps}", verdict=rescue["verdict"],
               step=rescue["resumed_from"], steps=result["trainings"][0]["steps"])  # fmt: skip
    back = rescue["back_after"]
    back = _NONE if back is None else say("back in {time}", time=format_duration(back))
    return [*rows, (say("killed on purpose (kill -9)"), _NONE, back, note)]


def _loader_rows(result: Mapping[str, Any]) -> list[Row]:
    rates, trials, why = (result["loaders"][key] for key in ("rates", "trials", "why"))
    rows: list[Row] = []
    speed = say("batches per second, 2 workers")
    if rates is None:
        rows.append((speed, _NONE, _NONE, why))
    else:
        torch = rates["torch"]
        for what, key in ((speed, "legroom"), (say("batches per second, no workers"), "batches")):
            note = say("{times} times torch's", times=ratio(rates[key] / torch))
            rows.append((what, f"{torch:.0f}" if key == "legroom" else _NONE, f"{rates[key]:.0f}", note))
    if result["shm_size"] is None:
        crashes = say("crashed DataLoaders")
    else:
        crashes = say("crashes with {size} of /dev/shm", size=format_size(result["shm_size"]))
    if not trials:
        return [*rows, (crashes, _NONE, _NONE, why)]
    torch, ours = trials
    note = say("torch's DataLoader finished here too")
    if torch["died"]:
        how = say("stalled") if torch["stood_still"] else torch["verdict"] or say("unknown")
        note = say("torch: {how} after {count} of {all} batches", how=how, count=torch["delivered"], all=torch["of"])
    counts = (say("{count} of 1", count=int(trial["died"])) for trial in (torch, ours))
    return [*rows, (crashes, *counts, note)]


def ratio(value: float) -> str:
    """A ratio with two digits."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def table_lines(rows: Sequence[Row], columns: int) -> list[str]:
    """The table in columns, or on a narrow screen with its figures below each other."""
    heads = (say("measured just now"), say("without"), "Legroom")
    figures = [heads, *(row[:3] for row in rows)]
    first, second, third = (max(map(cells, column)) for column in zip(*figures, strict=True))
    taken = first + second + third + 6
    if columns - taken < _NARROWEST:
        stacked = ((what, f"  {heads[1]}: {old}", f"  {heads[2]}: {new}", f"  {note}") for what, old, new, note in rows)
        return [line for row in stacked for line in row if line.strip()]
    lines = []
    for cell, note in zip(figures, ["", *(row[3] for row in rows)], strict=True):
        begun = "  ".join((left(cell[0], first), right(cell[1], second), right(cell[2], third), ""))
        lines += fill(note, columns, begun, " " * taken).split("\n") if note else [begun.rstrip()]
    return [lines[0], "-" * max(map(cells, lines)), *lines[1:]]
