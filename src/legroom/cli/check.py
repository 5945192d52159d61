"""`legroom check`: predict whether a training run fits. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json
from typing import Any

import click

from legroom.cli.layout import labelled, steps
from legroom.cli.needs import note_lines, plan_object, pool_lines, settings_line, term_lines, verdict_lines
from legroom.cli.options import DURATION, SIZE, asked, training_options
from legroom.columns import cells
from legroom.errors import UsageError
from legroom.records import Plan
from legroom.words import say


@click.command()
@click.option("--batch", type=int, required=True, metavar="N", help="Batch size.")
@click.option("--dataset", metavar="MODULE:OBJECT", help="Dataset to run the loader on, in a child process.")
@click.option(
    "--collate", metavar="MODULE:OBJECT", help="Collate function of the dataset, if not torch's default."
)
@click.option(
    "--timeout",
    type=DURATION,
    default=60.0,
    metavar="TIME",
    help="Time limit for the trial run and for drawing samples before it, together.  [default: 1m]",
)
@training_options
@click.option(
    "--start-method",
    type=click.Choice(["fork", "spawn", "forkserver"]),
    help="Start method of the workers.  [default: Python's default]",
)
@click.option(
    "--checkpoint-dir", metavar="DIR", help="Checkpoint directory; also check free space on its disk."
)
@click.option(
    "--checkpoint-bytes",
    type=SIZE,
    default=0,
    metavar="SIZE",
    help="Size of all checkpoints one process keeps.",
)
@click.option("--root", default="/", metavar="DIR", help="Read the machine below DIR: /host, or a recording.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def command(
    batch: int,
    dataset: str | None,
    collate: str | None,
    timeout: float,
    start_method: Any,
    checkpoint_dir: str | None,
    checkpoint_bytes: int,
    root: str,
    as_json: bool,
    **training: Any,
) -> int:
    """Predict whether a training run fits on this machine now, which memory pool runs out, and what would fit.

    Give the size of a batch with --data FILE, --sample-bytes SIZE or --dataset MODULE:OBJECT. Exits 0 if it fits or the
    answer is unknown, 1 if it is too big.
    """
    from legroom.cli import main
    from legroom.loader.preflight import check
    from legroom.probe.host import Host

    if dataset is None and training["data"] is None and training["sample_bytes"] is None:
        raise UsageError(
            say("the size of a batch is not given"),
            fix=(say("give one of --dataset MODULE:OBJECT, --data FILE, --sample-bytes SIZE"),),
        )
    found = check(
        dataset,
        batch_size=batch,
        collate_fn=collate,
        timeout=timeout,
        start_method=start_method,
        leaving=main.is_program,
        checkpoint_dir=checkpoint_dir,
        checkpoint_bytes=checkpoint_bytes,
        host=Host.at(root),
        **asked(training),
    )
    if as_json:
        click.echo(json.dumps(as_object(found), ensure_ascii=False))
    else:
        click.echo(as_text(found))
    return 1 if found.verdict == "too-big" else 0


def as_object(plan: Plan) -> dict[str, Any]:
    """The verdict as other programs read it."""
    return {"schema": "legroom.check/1", **plan_object(plan), "largest_batch": plan.largest_batch}


def as_text(plan: Plan) -> str:
    """The verdict as people read it."""
    lines = [
        *verdict_lines(plan),
        *_settings_lines(plan),
        *steps(plan.fix),
        "",
        say("Need"),
        *term_lines(plan.need),
        *note_lines(plan),
        "",
        say("Here now"),
        *pool_lines(plan),
    ]
    return "\n".join(lines)


def _settings_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.settings is None:
        lines.append(say("  no loader setting makes it fit"))
    elif plan.verdict == "too-big":
        label = say("  fits: ")
        lines.append(labelled(label, settings_line(plan.settings)))
        lines += [labelled(" " * cells(label), why) for why in plan.settings.why.values()]
    if plan.largest_batch:
        lines.append(say("  largest batch at these workers: {samples}", samples=plan.largest_batch))
    elif plan.largest_batch == 0:
        lines.append(say("  not even a batch of one fits at these workers"))
    return lines
