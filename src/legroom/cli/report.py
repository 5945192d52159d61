"""`legroom report`: one redacted bundle for a bug report. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from legroom.cli.layout import paragraph, shorten
from legroom.units import format_size
from legroom.words import say

if TYPE_CHECKING:
    from legroom.report.parts import Packed


@click.command()
@click.option("--out", metavar="FILE", help="Where to: FILE.zip or FILE.tar.gz; a new file here unless said.")
@click.option("--log", metavar="FILE", help="A training's log: its end goes in, with the verdict on it.")
@click.option("--run", metavar="FILE", help="A JSON file that legroom run --report wrote.")
@click.option("--watch", metavar="FILE", help="A log that legroom watch --log wrote: its last alarms.")
@click.option("--show", is_flag=True, help="Print everything that would be in it; write only with --out.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    out: str | None, log: str | None, run: str | None, watch: str | None, show: bool, as_json: bool
) -> int:
    """One file for a bug report, with what is private taken out.

    Users, hosts, addresses, tokens and data files get other names. Nothing is
    sent anywhere: look at the file, then send it yourself.
    """
    from legroom.probe.host import Host
    from legroom.report.bundle import checked_path, hidden_line, pack, redacted, write
    from legroom.report.gather import gather
    from legroom.report.known import known
    from legroom.report.parts import Asked
    from legroom.report.redact import Redactor

    path = None if show and out is None else checked_path(out or _free_name())
    host = Host()
    gathered = gather(Asked(log=log, run=run, watch=watch), host)
    redactor = Redactor(known(host, gathered.files))
    packed = redacted(gathered, redactor)
    size = None
    if path is not None:
        data = pack(packed, path)
        write(data, path)
        size = len(data)
    if as_json:
        report = {
            "schema": "legroom.report/1",
            "path": path,
            "bytes": size,
            "contents": [
                {"name": one.name, "bytes": one.size, "about": one.about}
                | ({"text": one.text} if show else {})
                for one in packed
            ],
            "hidden": dict(sorted(redactor.counts.items())),
            "left_out": list(gathered.left_out),
        }
        click.echo(json.dumps(report, ensure_ascii=False))
        return 0
    if show:
        click.echo("\n".join(f"==> {one.name} <==\n{one.text}" for one in packed))
    click.echo("\n".join(_table(packed)))
    click.echo(paragraph(hidden_line(redactor.counts), "", "  "))
    for line in gathered.left_out:
        click.echo(paragraph(say("left out: {what}", what=line), "", "  "))
    if path is not None and size is not None:
        click.echo(say("{path}: {size}, for your eyes only (0600)", path=path, size=format_size(size)))
        click.echo(say("Look before you send it. Nothing was sent anywhere."))
    return 0


def _table(packed: Sequence[Packed]) -> list[str]:
    """A line a file; the recorded machine, a file of the kernel each, is one line."""
    rows = [(one.name, one.size, one.about) for one in packed if "/" not in one.name]
    machine = [one for one in packed if "/" in one.name]
    if machine:
        about = say("{count} files of the kernel's that the probes read", count=len(machine))
        rows.append(("machine/", sum(one.size for one in machine), about))
    column = max(len(name) for name, _, _ in rows)
    return [shorten(f"  {name:<{column}}  {format_size(size):>9}  {about}") for name, size, about in rows]


def _free_name() -> str:
    """Named by the second; a second one within it gets a number."""
    name, number = time.strftime("legroom-report-%Y%m%d-%H%M%S"), 1
    path = f"{name}.zip"
    while os.path.lexists(path):
        number += 1
        path = f"{name}-{number}.zip"
    return path
