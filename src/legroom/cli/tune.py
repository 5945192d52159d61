"""`legroom tune`: settings for a dataset on this box. Parses, calls, renders; decides nothing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import click

from legroom.cli.params import DURATION
from legroom.cli.training import COUNT
from legroom.words import say

if TYPE_CHECKING:
    from legroom.budget.emit_training import Precision


@click.command()
@click.option(
    "--dataset", "spec", required=True, metavar="MODULE:OBJECT", help="Dataset, factory or DataLoader."
)
@click.option("--batch", type=int, metavar="N", help="Samples in one batch of one rank.")
@click.option("--effective-batch", type=int, metavar="N", help="Samples in one optimizer step; kept.")
@click.option("--step-seconds", type=DURATION, metavar="T", help="One training step: 0.018, 18ms.")
@click.option(
    "--ranks", type=int, default=1, show_default=True, metavar="N", help="Processes that train together."
)
@click.option("--collate", metavar="MODULE:FUNCTION", help="Collate; a DataLoader brings its own.")
@click.option("--loader", type=click.Choice(["legroom", "torch"]), default="legroom", show_default=True,
              help="The loader that will run.")  # fmt: skip
@click.option("--preset", type=click.Choice(["development", "production", "cluster"]), help="How far to go.")
@click.option("--climb", is_flag=True, help="Raise step by step by really running; keep the last good.")
@click.option("--set", "by_hand", multiple=True, metavar="NAME=VALUE", help="Set one by hand: workers=2.")
@click.option("--last", is_flag=True, help="What worked last time; nothing is measured.")
@click.option(
    "--emit", type=click.Choice(["deepspeed", "accelerate"]), help="Print only that launcher's file."
)
@click.option("--zero", type=click.Choice(["2", "3"]), help="Stage of ZeRO in the file.")
@click.option("--offload", is_flag=True, help="ZeRO with its states in host memory.")
@click.option("--precision", type=click.Choice(["bf16", "fp16", "no"]), default="bf16", show_default=True,
              help="Mixed precision in the file.")  # fmt: skip
@click.option("--params", type=COUNT, metavar="N", help="The model's parameters: what ZeRO would save.")
@click.option("--timeout", type=DURATION, default=60.0, metavar="T", help="For the dataset's child: 60s.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    spec: str,
    batch: int | None,
    effective_batch: int | None,
    step_seconds: float | None,
    ranks: int,
    collate: str | None,
    loader: Literal["legroom", "torch"],
    preset: str | None,
    climb: bool,
    by_hand: tuple[str, ...],
    last: bool,
    emit: str | None,
    zero: str | None,
    offload: bool,
    precision: Precision,
    params: int | None,
    timeout: float,
    as_json: bool,
) -> int:
    """Loader and batch settings that keep up at the least memory.

    Draws a few samples and one batch in a child process, below five seconds. Exits 1 when nothing fits.
    """
    from legroom.budget.zero import Shape, zero_rows
    from legroom.cli import tune_emit as view
    from legroom.loader.tune import named_tuning as tuning
    from legroom.probe.host import Host
    from legroom.probe.memory import memory, ram_pool

    if emit is None and (zero is not None or offload):
        raise click.UsageError(
            say("--zero and --offload go into a file: give --emit deepspeed or --emit accelerate")
        )
    rows = () if params is None else zero_rows(Shape(params, ranks))
    if last:
        found = tuning.last_named(spec)
        if found is None:
            click.echo(say("nothing is remembered for {spec} in this directory", spec=spec), err=True)
            return 1
    elif batch is None:
        raise click.UsageError(say("--batch is needed: samples in one batch of one rank"))
    else:
        found = tuning.tune_named(
            spec,
            batch_size=batch,
            effective_batch=effective_batch,
            step_seconds=step_seconds or 0.0,
            ranks=ranks,
            collate=collate,
            preset=preset,
            climbing=climb,
            kind=loader,
            by_hand=_pairs(by_hand),
            timeout=timeout,
        )
    view.show(
        found,
        emit=emit,
        zero=None if zero is None else int(zero),
        offload=offload,
        precision=precision,
        rows=rows,
        ram=ram_pool(memory(Host())),
        as_json=as_json,
    )
    return 1 if found.plan is not None and found.plan.verdict == "too-big" else 0


def _pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    from legroom.model.settings_env import read_word

    pairs: dict[str, Any] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals:
            raise click.UsageError(say("--set {text}: write NAME=VALUE, like workers=2", text=text))
        pairs[name.strip()] = read_word(name.strip(), value.strip())
    return pairs
