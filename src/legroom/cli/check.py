"""`legroom check`: whether this training survives here. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json
from typing import Any

import click

from legroom.cli.options import DURATION, SIZE, asked, training_options
from legroom.errors import UsageError
from legroom.words import say


@click.command()
@click.option("--batch", type=int, required=True, metavar="N", help="Samples in a batch.")
@click.option("--dataset", metavar="MODULE:OBJECT", help="Try the loader on it, in a child process.")
@click.option("--collate", metavar="MODULE:OBJECT", help="Its collate function, where it has one of its own.")
@click.option(
    "--timeout",
    type=DURATION,
    default=120.0,
    metavar="TIME",
    help="For drawing, and again for the trial run.  [default: 2m]",
)
@training_options
@click.option(
    "--start-method",
    type=click.Choice(["fork", "spawn", "forkserver"]),
    help="How the loader's workers start.  [default: as this Python starts them]",
)
@click.option("--checkpoint-dir", metavar="DIR", help="Where checkpoints go: that disk counts too.")
@click.option(
    "--checkpoint-bytes", type=SIZE, default=0, metavar="SIZE", help="All that are kept, of one process."
)
@click.option("--root", default="/", metavar="DIR", help="Read the machine below DIR: /host, or a recording.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
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
    """Whether this training fits here now, which pool breaks first, and the largest settings that fit.

    Say what a batch holds: --data FILE, --sample-bytes SIZE, or --dataset MODULE:OBJECT. Exits 1 when it is too big;
    0 when it fits, and when nothing that is known speaks against it.
    """
    from legroom.cli import check_view as view
    from legroom.cli import main
    from legroom.loader.preflight import check
    from legroom.probe.host import Host

    if dataset is None and training["data"] is None and training["sample_bytes"] is None:
        raise UsageError(
            say("the bytes of a batch are not known"),
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
        click.echo(json.dumps(view.as_object(found), ensure_ascii=False))
    else:
        click.echo(view.as_text(found))
    return 1 if found.verdict == "too-big" else 0
