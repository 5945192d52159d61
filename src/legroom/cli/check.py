"""`legroom check`: predict whether a training run fits; its text and JSON output."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import click

from legroom.cli.memory_need_output import (
    arguments,
    note_lines,
    plan_object,
    pool_lines,
    settings_line,
    term_lines,
    verdict_lines,
)
from legroom.cli.options import (
    AT_LEAST_1,
    LOADER_OF_CHECK,
    SIZE,
    TRAINING_NEEDS,
    WORKERS,
    asked,
    json_option,
    refuse_beside,
    require_options,
    require_workers,
    root_option,
    timeout_option,
    training_options,
    typed,
)
from legroom.cli.text_layout import finding_lines, labelled, paragraph, print_result, steps
from legroom.errors import UsageError
from legroom.messages import cells, counted, listed, phrase, say
from legroom.records.workload import Plan


@click.command()
@click.option(
    "--batch",
    type=AT_LEAST_1,
    metavar="N",
    help="Batch size per rank (per device). Required unless --dataset names a DataLoader; then its batch size is the "
    "default.",
)
@click.option(
    "--dataset",
    metavar="MODULE:OBJECT",
    help="Dataset, function that returns one, or DataLoader: data:train_set or data.py:train_set. A child "
    "process loads samples from it. If it is a DataLoader, its own settings are used, except those given as options.",
)
@click.option(
    "--collate",
    metavar="MODULE:FUNCTION",
    help="collate_fn (with --dataset). Default: if --dataset names a DataLoader, its collate_fn; otherwise torch's "
    "default.",
)
@click.option(
    "--share",
    is_flag=True,
    help="Check instead whether several training runs can share one set of workers: load the same batches in two "
    "processes and list those that differ, for example because a sample depends on the time or on earlier samples. "
    "Exits 1 if any differ. Random generators are seeded as legroom.DataLoader(share=...) seeds them. Memory is not "
    "predicted. Needs --dataset.",
)
@timeout_option
@click.option(
    "--process-ram",
    type=SIZE,
    metavar="SIZE",
    help="RAM per rank, not counting batches and parameters. The larger of this and the measured value is used.  "
    "[default: measured, else 0]",
)
@click.option(
    "--per-process",
    type=SIZE,
    metavar="SIZE",
    help="Space in /dev/shm that each rank uses for anything except the DataLoader's batches.  [default: 0]",
)
@training_options(LOADER_OF_CHECK)
@click.option(
    "--start-method",
    type=click.Choice(["fork", "spawn", "forkserver"]),
    help="Start method of the workers (with at least 1 worker). Default: that of the DataLoader that --dataset names, "
    "otherwise Python's default.",
)
@click.option(
    "--checkpoint-dir",
    metavar="DIR",
    help="Check that the disk of DIR has space for the checkpoints (with --checkpoint-bytes).",
)
@click.option(
    "--checkpoint-bytes",
    type=SIZE,
    default=0,
    metavar="SIZE",
    help="Total size of the checkpoints that each rank keeps (with --checkpoint-dir).",
)
@root_option
@json_option
def command(
    batch: int | None,
    dataset: str | None,
    collate: str | None,
    share: bool,
    timeout: float,
    start_method: Any,
    checkpoint_dir: str | None,
    checkpoint_bytes: int,
    root: str,
    as_json: bool,
    **training: Any,
) -> int:
    """Predict whether a DataLoader fits in the free /dev/shm and RAM; print what runs out and settings that fit.

    Describe the samples with --data FILE, --sample-bytes SIZE or --dataset MODULE:OBJECT. If torch is installed, a
    child process runs a DataLoader with these settings for a few seconds and measures its memory use. With --data or
    --sample-bytes, this DataLoader loads dummy tensors as large as your samples.

    To count a model in host RAM, give --params. For other RAM of the training process, give --process-ram. GPU memory
    is not predicted.

    Exits 1 if the DataLoader does not fit, 0 if it fits or the answer is unknown.
    """
    refuse_beside("share", typed() - _OF_SHARE)
    # A DataLoader may have workers: then they are not typed.
    require_options({name: needed for name, needed in _NEEDS.items() if dataset is None or needed != WORKERS})
    require_workers(dataset is not None)
    if share and dataset is not None:
        return _check_share(dataset, collate, batch, timeout, as_json)
    from legroom.cli import main
    from legroom.loader import legroom_check
    from legroom.probe.host_files_and_syscalls import Host

    if dataset is None and training["data"] is None and training["sample_bytes"] is None:
        raise UsageError(
            say("the size of a batch is unknown"),
            fix=(
                say("pass one of --dataset MODULE:OBJECT, --data FILE, --sample-bytes SIZE"),
                say(
                    "give the dataset and the batch size: legroom check --dataset data:train_set --batch 64 --workers 4"
                ),
            ),
        )
    for name in _OF_LOADER - typed():  # as the DataLoader has it
        training[name] = None
    legroom_check.may_be_replaced = main.is_program
    found = legroom_check.check(
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
    print_result(as_json, "check", lambda: as_object(found), lambda: as_text(found))
    return 1 if found.verdict == "too-big" else 0


_OF_LOADER = {"workers", "prefetch", "persistent_workers", "pin_memory", "loader"}
_OF_SHARE = {"share", "dataset", "collate", "batch", "timeout", "as_json", "lang"}
_NEEDS = {
    **TRAINING_NEEDS, "share": ("dataset",), "collate": ("dataset",), "start_method": WORKERS,
    "checkpoint_dir": ("checkpoint_bytes",), "checkpoint_bytes": ("checkpoint_dir",),
}  # fmt: skip


def _check_share(dataset: str, collate: str | None, batch: int | None, timeout: float, as_json: bool) -> int:
    """Whether trainers can share batches of this dataset: 0 if they are the same in every process, else 1."""
    from legroom.loader.measure.compare_batches_made_twice import differing_parts

    found = differing_parts(dataset, collate, batch, timeout)
    print_result(as_json, "check.share", lambda: found, lambda: "\n".join(_share_lines(found)))
    return 1 if found["differing"] else 0


def _share_lines(found: Mapping[str, Any]) -> Iterator[str]:
    if not found["differing"]:
        told = counted(
            found["batches"], phrase("{count} batch made in two processes is equal: it can be shared"),
            phrase("{count} batches made in two processes are equal: they can be shared"),
        )  # fmt: skip
        yield paragraph(told, "", "  ")
        return
    told = say("batches that differ when another process makes them: {count} of {all}",
               count=len(found["differing"]), all=found["batches"])  # fmt: skip
    yield paragraph(told, "", "  ")
    for number, paths in found["differing"].items():
        parts = listed(f"batch{path}" for path in paths[:4])
        yield paragraph(say("batch {number}: {parts}", number=number, parts=parts), "  ", "    ")
    advice = say("The dataset uses something other than the global generators of torch, random and NumPy: "
                 "the clock, a counter, a generator of its own")  # fmt: skip
    yield paragraph(advice, "  ", "    ")


def as_object(plan: Plan) -> dict[str, Any]:
    """The verdict for JSON."""
    said = [dataclasses.asdict(finding) for finding in plan.findings]
    return {
        **plan_object(plan),
        "at_least": list(plan.need.at_least),
        "largest_batch": plan.largest_batch,
        "findings": said,
        "from_loader": dict(plan.from_loader),
        "instead_of_loader": {
            name: {"given": given, "own": own} for name, (given, own) in plan.instead_of_loader.items()
        },
    }


def as_text(plan: Plan) -> str:
    """The verdict as text."""
    lines = [
        *verdict_lines(plan),
        *_of_loader_lines(plan),
        *_settings_lines(plan),
        *steps(plan.fix),
        "",
        say("Need"),
        *term_lines(plan.need),
        *note_lines(plan),
        "",
        say("This machine now"),
        *pool_lines(plan),
        *(line for finding in plan.findings for line in ("", *finding_lines(finding))),
    ]
    return "\n".join(lines)


def _of_loader_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.from_loader:
        lines.append(labelled(say("  from the DataLoader: "), arguments(plan.from_loader)))
    if plan.instead_of_loader:
        both = listed(
            say("{name}={given} (DataLoader: {own})", name=name, given=given, own=own)
            for name, (given, own) in plan.instead_of_loader.items()
        )
        lines.append(labelled(say("  given by you: "), both))
    return lines


def _settings_lines(plan: Plan) -> list[str]:
    lines = []
    if plan.settings is None:
        lines.append(say("  does not fit with any DataLoader settings"))
    elif plan.verdict == "too-big":
        label = say("  fits: ")
        lines.append(labelled(label, settings_line(plan.settings)))
        lines += [labelled(" " * cells(label), why) for why in plan.settings.why.values()]
    if plan.largest_batch:
        lines.append(say("  largest batch size with these workers: {samples}", samples=plan.largest_batch))
    elif plan.largest_batch == 0 and plan.settings is not None:
        lines.append(say("  not even batch size 1 fits with these workers"))
    return lines
