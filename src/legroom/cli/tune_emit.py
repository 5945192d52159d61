"""Settings as files for launchers, and what ZeRO would save, as `legroom tune` prints them.

Covers: the output of --emit and --params. Does not cover: writing the files (budget.emit_training), the sums
(budget.zero).
"""

from __future__ import annotations

import json
from dataclasses import asdict

import click

from legroom.budget.emit_training import Precision, emit_training
from legroom.budget.zero import ZeroRow
from legroom.cli import tune_view as view
from legroom.columns import left, right
from legroom.model import Pool, Settings
from legroom.units import format_size
from legroom.words import phrase, say

_OFFLOADS = {"none": "", "optimizer": phrase(", optimizer offloaded"), "all": phrase(", all offloaded")}


def show(
    settings: Settings,
    *,
    emit: str | None,
    zero: int | None,
    offload: bool,
    precision: Precision,
    rows: tuple[ZeroRow, ...],
    ram: Pool,
    as_json: bool,
) -> None:
    """The settings, the file alone where one was asked for, and the rows beside it."""
    text = emit and emit_training(emit, settings, zero=zero, offload=offload, precision=precision)
    if as_json:
        report = json.loads(view.as_json(settings))
        if emit:
            report["emit"] = {"kind": emit, "text": text}
        if rows:
            report["zero"] = [asdict(row) for row in rows]
        click.echo(json.dumps(report, ensure_ascii=False))
        return
    click.echo(text or view.as_text(settings))
    if rows:
        # Beside a file the table is for the person who asked, not part of the file.
        click.echo("\n" + zero_text(rows, ram), err=bool(emit))


def zero_text(rows: tuple[ZeroRow, ...], ram: Pool) -> str:
    """The table, and a line on the host's memory where a row takes more than is free."""
    lines = [
        say("Weights, gradients and Adam's states of this model"),
        " ".join((" " * 29, *(right(head, 9) for head in (say("each GPU"), say("saves"), say("each host"))))),
    ]
    for row in rows:
        name = say("ZeRO {stage}", stage=row.stage) if row.stage else say("plain torch")
        more, less = ("≥", "≤") if row.at_least else ("", "")
        lines.append(
            f"  {left(name + say(_OFFLOADS[row.offload]), 27)} {more + format_size(row.gpu):>9} "
            f"{less + format_size(row.saves):>9} {format_size(row.host):>9}  {row.formula}"
        )
    if ram.free is not None:
        over = [row for row in rows if row.host > ram.free]
        if over:
            lines.append(
                say(
                    "{count} of these take more host memory than the {free} that are free here",
                    free=format_size(ram.free), count=len(over),
                )
            )  # fmt: skip
    return "\n".join(lines)
