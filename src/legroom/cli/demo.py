"""`legroom demo`: what Legroom does, measured on this machine. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING

import click

from legroom.cli.layout import width
from legroom.cli.streams import for_drawing
from legroom.words import say

if TYPE_CHECKING:
    from legroom.demo.screen import Screen


@click.command()
@click.option("--quick", is_flag=True, help="Less data and fewer rounds: rougher figures, sooner.")
@click.option("--out", metavar="FILE", help="The picture: .png or .svg; legroom-demo.png here unless said.")
@click.option("--keep", is_flag=True, help="Keep the folder with its data, logs and checkpoints.")
@click.option("--no-torch", is_flag=True, help="As if torch were not installed.")
@click.option("--plain", is_flag=True, help="Lines, on a terminal too.")
@click.option("--no-color", is_flag=True, help="No colours.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout; lines go to stderr.")
def command(
    quick: bool, out: str | None, keep: bool, no_torch: bool, plain: bool, no_color: bool, as_json: bool
) -> int:
    """What Legroom does, measured on this machine in a minute or so.

    Makes a dataset, lets torch's loader and ours live in a 64 MB /dev/shm,
    runs four trainings with a copy each and then on one copy, kills one of
    them and rescues it. Ends with a table and a picture, and leaves nothing
    else behind.
    """
    from legroom.charts.chart_file import render
    from legroom.cli.demo_view import table_lines
    from legroom.demo.picture import demo_chart, picture_path
    from legroom.demo.result import as_object
    from legroom.demo.show import Wish, show
    from legroom.demo.table import rows
    from legroom.system.atomic_file import replace_file

    path = picture_path(out)
    wish = Wish(quick=quick, torch=not no_torch, keep=keep)
    result, kept = show(wish, lambda: _screen(as_json, plain, no_color))
    replace_file(path, render(demo_chart(result), path.suffix.lower()))
    if as_json:
        kept_at = None if kept is None else str(kept)
        click.echo(json.dumps(as_object(result, str(path), kept_at), ensure_ascii=False))
        return 0
    click.echo()
    for line in table_lines(rows(result), width()):
        click.echo(line)
    click.echo()
    click.echo(say("took {seconds:.0f} s; the picture: {path}", seconds=result.seconds, path=path))
    if kept is not None:
        click.echo(say("kept: {path}", path=kept))
    return 0


def _screen(as_json: bool, plain: bool, no_color: bool) -> Screen:
    from legroom.cli.demo_view import wrapped
    from legroom.demo.screen import Bars, Lines

    utf = (sys.stdout.encoding or "").lower().startswith("utf")
    if as_json or plain or not sys.stdout.isatty() or os.environ.get("TERM") == "dumb" or not utf:
        return Lines(lambda line: click.echo(line, err=as_json), wrapped)
    colour = not no_color and not os.environ.get("NO_COLOR")
    return Bars(wrapped, colour=colour, to=for_drawing(sys.stdout))
