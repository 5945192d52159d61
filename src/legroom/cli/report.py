"""`legroom report`: one redacted bundle for a bug report."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import click

from legroom.cli.options import json_option
from legroom.cli.text_layout import paragraph, print_result
from legroom.messages import say
from legroom.units import format_size

if TYPE_CHECKING:
    from legroom.report.bundle import RedactedPart


@click.command()
@click.option(
    "--out", metavar="FILE", help="Output file, ending in .zip or .tar.gz (default: a new file in this directory)."
)
@click.option("--log", metavar="FILE", help="Add the end of a training log, and a diagnosis of the failure.")
@click.option("--run", metavar="FILE", help="Add a JSON file written by legroom run --report.")
@click.option("--watch", metavar="FILE", help="Add the last alarms of a log written by legroom watch --log.")
@click.option("--show", is_flag=True, help="Print everything that goes into the file; without --out, write no file.")
@json_option
def command(out: str | None, log: str | None, run: str | None, watch: str | None, show: bool, as_json: bool) -> int:
    """Write a file for a bug report about Legroom; recognized names and secrets are replaced with placeholders.

    User names, host names, addresses, tokens and the names of data files are replaced; names of directories are not.
    The file contains what legroom doctor reads, versions of packages, LEGROOM_* variables and the list of cache
    entries; --log, --run and --watch add more. Nothing is sent anywhere: check the file, then send it yourself.
    """
    from legroom.probe.host_files_and_syscalls import Host
    from legroom.report.bundle import Attachments, checked_path, hidden_line, pack, redacted, write
    from legroom.report.collect import collect, identities
    from legroom.report.redact import Redactor

    path = None if show and out is None else checked_path(out or _free_name())
    host = Host()
    collected = collect(Attachments(log=log, run=run, watch=watch), host)
    redactor = Redactor(identities(host, collected.files))
    packed = redacted(collected, redactor)
    size = None
    if path is not None:
        data = pack(packed, path)
        write(data, path)
        size = len(data)
    report = {
        "path": path,
        "bytes": size,
        "contents": [
            {"name": one.name, "bytes": one.size, "about": one.about} | ({"text": one.text} if show else {})
            for one in packed
        ],
        "hidden": dict(sorted(redactor.counts.items())),
        "left_out": list(collected.left_out),
    }
    lines = [f"==> {one.name} <==\n{one.text}" for one in packed] if show else []
    lines += [*_table(packed), paragraph(hidden_line(redactor.counts), "", "  ")]
    lines += [paragraph(say("left out: {what}", what=line), "", "  ") for line in collected.left_out]
    kept = say("not replaced: names of directories and scripts, and words that your script printed")
    lines.append(paragraph(kept, "", "  "))
    if path is not None and size is not None:
        told = say("{path}: {size}, readable only by you (0600)", path=path, size=format_size(size))
        lines.append(paragraph(told, "", "  "))
        lines.append(say("Check it before you send it. Nothing was sent anywhere."))
    print_result(as_json, "report", lambda: report, lambda: "\n".join(lines))
    return 0


def _table(packed: Sequence[RedactedPart]) -> list[str]:
    """One line for each file; the files of /proc and /sys share one line."""
    rows = [(one.name, one.size, one.about) for one in packed if "/" not in one.name]
    machine = [one for one in packed if "/" in one.name]
    if machine:
        about = say("{count} files of /proc and /sys that the probes read", count=len(machine))
        rows.append(("machine/", sum(one.size for one in machine), about))
    column = max(len(name) for name, _, _ in rows)
    lines = []
    for name, size, about in rows:
        start = f"  {name:<{column}}  {format_size(size):>9}  "
        lines.append(paragraph(about, start, " " * len(start)))
    return lines


def _free_name() -> str:
    """A name with the time; a second report in the same second gets a number."""
    name, number = time.strftime("legroom-report-%Y%m%d-%H%M%S"), 1
    path = f"{name}.zip"
    while os.path.lexists(path):
        number += 1
        path = f"{name}-{number}.zip"
    return path
