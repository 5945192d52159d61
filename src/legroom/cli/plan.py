"""`legroom plan`: how big a box a workload needs. Parses, calls, renders; decides nothing."""

from __future__ import annotations

import json
from typing import Any

import click

from legroom.budget.emit import KINDS
from legroom.cli.params import SIZE
from legroom.cli.training import asked, training_options
from legroom.words import say


@click.command()
@click.option("--gpus", type=int, metavar="N", help="GPUs; counted here where not given.")
@click.option("--jobs-per-gpu", type=int, default=1, show_default=True, help="Trainings on each GPU.")
@click.option("--measure", type=int, multiple=True, metavar="PID…", help="Measure running trainings.")
@click.argument("pids", nargs=-1, type=int, metavar="")
@click.option("--match", metavar="REGEX", help="Measure those whose command line matches.")
@click.option("--batch", type=int, metavar="N", help="Samples in a batch.")
@click.option("--shared", is_flag=True, help="Count one shared copy of the data in /dev/shm.")
@click.option("--nccl", type=SIZE, default=0, metavar="SIZE", help="NCCL's segments of one process.")
@click.option("--gpu-memory", type=SIZE, metavar="SIZE", help="GPU memory of one process.")
@training_options
@click.option("--emit", type=click.Choice(KINDS), help="Print only what sets the recommended size there.")
@click.option("--root", default="/", metavar="DIR", help="Read the machine below DIR: /host, or a recording.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object on stdout.")
def command(
    gpus: int | None,
    jobs_per_gpu: int,
    measure: tuple[int, ...],
    pids: tuple[int, ...],
    match: str | None,
    batch: int | None,
    shared: bool,
    nccl: int,
    gpu_memory: int | None,
    emit: str | None,
    root: str,
    as_json: bool,
    **training: Any,
) -> int:
    """How big a box GPUs × jobs need, and how many jobs fit this one.

    Say what one training takes: --per-process SIZE, or --measure PID or --match REGEX for running ones, or
    --data FILE or --sample-bytes SIZE with --batch, --workers and --prefetch. Exits 1 when it does not fit here.
    """
    if pids and not measure:
        raise click.UsageError(say("process ids belong to --measure"))
    from legroom.budget.planning import plan
    from legroom.cli import plan_view as view
    from legroom.probe.host import Host

    found = plan(
        gpus=gpus,
        jobs_per_gpu=jobs_per_gpu,
        measure=(*measure, *pids),
        match=match,
        batch_size=batch,
        shared=shared,
        nccl=nccl,
        gpu_bytes=gpu_memory,
        host=Host.at(root),
        **asked(training),
    )
    if emit is not None:
        return view.print_snippet(found, emit, as_json)
    if as_json:
        click.echo(json.dumps(view.as_object(found), ensure_ascii=False))
    else:
        click.echo(view.as_text(found))
    return 1 if found.verdict == "too-big" else 0
