"""`legroom plan`: estimate the memory of N jobs per GPU; its text and JSON output."""

from __future__ import annotations

import dataclasses
from typing import Any

import click

from legroom.advice.config_snippets_for_shm_size import KINDS
from legroom.advice.config_snippets_for_shm_size import emit as snippet
from legroom.cli.language_and_streams import extra_arguments, remark_text
from legroom.cli.memory_need_output import note_lines, plan_object, pool_lines, term_lines, verdict_lines
from legroom.cli.options import (
    AT_LEAST_1,
    LOADER_OF_PLAN,
    SIZE,
    TRAINING_NEEDS,
    asked,
    json_option,
    refuse_beside,
    require_options,
    require_workers,
    root_option,
    training_options,
)
from legroom.cli.text_layout import labelled, paragraph, print_result, process_lines, runtime_line, steps
from legroom.messages import cells, counted, left, phrase, right, say
from legroom.records.workload import Job, Plan
from legroom.units import format_size


def _process_ids(ctx: click.Context, param: click.Parameter, value: tuple[str, ...]) -> tuple[int, ...]:
    """The process IDs after that of --measure. Anything else belongs to no option: the shell made it of a pattern."""
    others = [word for word in value if not word.isdecimal()]
    if others:
        raise extra_arguments(ctx, others)
    return tuple(map(int, value))


@click.command()
@click.option("--gpus", type=AT_LEAST_1, metavar="N", help="Number of GPUs; default: those on this machine.")
@click.option("--jobs-per-gpu", type=AT_LEAST_1, metavar="N", default=1, show_default=True, help="Jobs on each GPU.")
@click.option(
    "--measure",
    type=AT_LEAST_1,
    multiple=True,
    metavar="PID…",
    help="Measure running jobs and use their mean. Give one process ID per job: --measure 4711 4712.",
)
@click.argument("pids", nargs=-1, metavar="", callback=_process_ids)
@click.option("--match", metavar="REGEX", help="Measure running jobs whose command line matches, and use their mean.")
@click.option("--batch", type=AT_LEAST_1, metavar="N", help="Batch size per rank (with --data or --sample-bytes).")
@click.option(
    "--shared", is_flag=True, help="Count one copy of the data file in /dev/shm that all jobs share (with --data)."
)
@click.option(
    "--per-process",
    type=SIZE,
    metavar="SIZE",
    help="/dev/shm that each rank uses. If you also give --batch, leave out the DataLoader's batches.  [default: 0]",
)
@click.option(
    "--process-ram",
    type=SIZE,
    metavar="SIZE",
    help="RAM per rank, not counting batches and parameters. Replaces the RAM that --measure or --match finds.  "
    "[default: measured, else 0]",
)
@click.option(
    "--nccl", type=SIZE, default=0, metavar="SIZE", help="/dev/shm that NCCL uses in each rank.  [default: 0]"
)
@click.option(
    "--gpu-memory",
    type=SIZE,
    metavar="SIZE",
    help="GPU memory that each rank uses. Default: GPU memory is not checked.",
)
@training_options(LOADER_OF_PLAN)
@click.option(
    "--emit",
    type=click.Choice(KINDS),
    help="Print only a configuration snippet that sets the recommended size of /dev/shm. kubernetes-warm prints a "
    "DaemonSet instead, which loads data into the cache of every node; replace its example image and URL.",
)
@root_option
@json_option
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
    """Estimate the /dev/shm and RAM that your jobs need, and how many jobs fit on this machine.

    Describe one job in one of three ways:

    (1) Give the /dev/shm that each rank uses: --per-process SIZE.

    (2) Measure a job that is running: --measure PID or --match REGEX.

    (3) Describe its DataLoader: --batch N with --data FILE or --sample-bytes SIZE, and --workers N.

    You can combine (1) and (3); then leave the DataLoader's batches out of --per-process.

    With (2), the RAM estimate is complete. Leave out --params and --nccl: the measured values already include them. To
    replace the measured RAM, give --process-ram.

    With (1), (3) or both, the RAM estimate counts only the batches and --per-process: add the rest with --process-ram
    and --params. Add NCCL's part of /dev/shm with --nccl.

    GPU memory is checked only if you give --gpu-memory.

    Exits 1 if the jobs do not fit.
    """
    if pids and not measure:
        raise click.UsageError(say("pass process ids after --measure"))
    refuse_beside("measure", _OF_LOADER)
    refuse_beside("match", _OF_LOADER)
    require_options(_NEEDS)
    require_workers()
    from legroom.loader.legroom_plan import plan
    from legroom.probe.host_files_and_syscalls import Host

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
        return _print_snippet(found, emit, as_json)
    print_result(as_json, "plan", lambda: as_object(found), lambda: as_text(found))
    return 1 if found.verdict == "too-big" else 0


# They describe the DataLoader: without --batch there is none, and a running job is measured with its own.
_OF_LOADER = {
    "sample_bytes", "workers", "prefetch", "persistent_workers", "pin_memory", "loader", "val_workers", "val_batch",
}  # fmt: skip
_NEEDS = {
    **dict.fromkeys(sorted(_OF_LOADER), ("batch",)), **TRAINING_NEEDS, "shared": ("data",), "data": ("batch", "shared"),
}  # fmt: skip

_MOST_SHOWN = 8


def as_object(plan: Plan) -> dict[str, Any]:
    """The plan for JSON."""
    return {
        **plan_object(plan),
        "recommend": None if plan.sizes is None else dataclasses.asdict(plan.sizes),
        "table": [dataclasses.asdict(row) for row in plan.table],
        "fits_now": {"jobs_per_gpu": plan.fits_now},
        "gpus": plan.gpus,
        "jobs_per_gpu": plan.jobs_per_gpu,
        "now": _now_object(plan),
        "fix": list(plan.fix),
    }


def _now_object(plan: Plan) -> dict[str, Any]:
    shm = plan.machine.shm if plan.machine else None
    return {
        "size": shm.size if shm else None,
        "used": shm.used if shm else None,
        "free": shm.free if shm else None,
        "others": plan.others,
        "measured": [
            {"pid": job.pid, "command": job.command, "shm": job.held.get("shm"), "rss_shmem": _rss_shmem(job)}
            for job in plan.measured
        ],
    }


def as_text(plan: Plan) -> str:
    """The plan as text."""
    runtime = plan.machine.runtime if plan.machine else None
    lines = []
    if runtime is not None:
        lines += [runtime_line(runtime), ""]
    lines += [say("In use now"), *pool_lines(plan), *_measured_lines(plan), ""]
    lines += [_title(plan), *term_lines(plan.need), *_others_line(plan), *note_lines(plan), ""]
    lines += [*_size_lines(plan), "", *_table_lines(plan), "", *verdict_lines(plan), _fits_line(plan)]
    lines += ["", *_setting_lines(plan)]
    return "\n".join(lines).rstrip()


def _setting_lines(plan: Plan) -> list[str]:
    if plan.fix:
        return [say("How to set it here"), *steps(plan.fix)]
    here = plan.machine.shm.size if plan.machine else None
    needed = plan.need.shm + (plan.others or 0)
    if here is not None and plan.sizes is not None and here >= plan.sizes.recommended >= needed:
        return [say("/dev/shm is {size} here: no change needed", size=format_size(here))]
    return []


def _title(plan: Plan) -> str:
    gpus, jobs = plan.gpus or 1, plan.jobs_per_gpu or 1
    processes = next(row.processes for row in plan.table if row.jobs_per_gpu == jobs)
    return say(
        "Need: {gpus} × {jobs} = {processes}"
        if processes == gpus * jobs
        else "Need: {gpus} × {jobs} × {ranks} = {processes}",
        gpus=counted(gpus, phrase("{count} GPU"), phrase("{count} GPUs")),
        jobs=counted(jobs, phrase("{count} job"), phrase("{count} jobs")),
        ranks=counted(processes // (gpus * jobs), phrase("{count} rank"), phrase("{count} ranks")),
        processes=counted(processes, phrase("{count} process"), phrase("{count} processes")),
    )


def _rss_shmem(job: Job) -> int | None:
    from legroom.probe.memory_of_running_jobs import sum_if_known

    return sum_if_known([process.rss_shmem for process in job.processes])


def _measured_lines(plan: Plan) -> list[str]:
    if not plan.measured:
        return []
    rows = [(job.pid, job.held.get("shm"), _rss_shmem(job), job.command) for job in plan.measured]
    lines = ["", say("Measured: /dev/shm used by running jobs"), *process_lines(rows, _MOST_SHOWN)]
    why = say(
        "RssShmem counts all shared memory that a process touched, also outside /dev/shm, and counts it "
        "once per process"
    )
    return [*lines, paragraph(why, "  ", "  ")]


def _others_line(plan: Plan) -> list[str]:
    if not plan.others:
        return []
    text = say("used in /dev/shm by other processes now; added to the need")
    return [labelled(f"  {left(say('others'), 7)}{format_size(plan.others):>8}  ", text)]


def _size_lines(plan: Plan) -> list[str]:
    sizes = plan.sizes
    if sizes is None:
        return []
    wanted = plan.need.shm + (plan.others or 0)
    lines = [say("Sizes for /dev/shm")]
    for name, size in (
        (say("minimum"), sizes.minimum),
        (say("recommended"), sizes.recommended),
        (say("conservative"), sizes.conservative),
    ):
        if size < wanted:  # capped below the need: RAM is too small for any size of /dev/shm
            lines.append(f"  {left(name, 13)}{say('above RAM')}")
            continue
        if plan.others and wanted:
            text = phrase("{times:.1f} × {together} (need + others)")
            times = say(text, times=size / wanted, together=format_size(wanted))
        else:
            times = say("{times:.1f} × the need", times=size / wanted) if wanted else say("no need")
        lines.append(f"  {left(name, 13)}{format_size(size):>8}  {times}")
    return lines


def _table_lines(plan: Plan) -> list[str]:
    heads = (say("jobs/GPU"), say("processes"), say("need"), say("recommended"))
    columns = [max(cells(head), least) for head, least in zip(heads, (10, 9, 8, 11), strict=True)]
    lines = ["  " + "  ".join(map(right, heads, columns))]
    for row in plan.table:
        mark = ">" if row.jobs_per_gpu == plan.jobs_per_gpu else " "
        # Capped below the need: RAM is too small for any size of /dev/shm.
        size = format_size(row.recommended) if row.recommended >= row.need else say("above RAM")
        figures = (str(row.jobs_per_gpu), str(row.processes), format_size(row.need), size)
        lines.append(f"{mark} " + "  ".join(map(right, figures, columns)))
    return lines


def _fits_line(plan: Plan) -> str:
    if plan.fits_now is not None:
        text = say("jobs per GPU that fit now: {jobs}", jobs=plan.fits_now)
    elif plan.unknown:
        text = say("number of jobs that fit now: unknown")
    else:
        text = say("no known limit on the number of jobs")
    return paragraph(text, "  ", "  ")


def _print_snippet(plan: Plan, kind: str, as_json: bool) -> int:
    """Print only the snippet; 1 where the size it sets is below the need."""
    assert plan.sizes is not None
    text = snippet(kind, plan.sizes.recommended, need=plan.need, gpus=plan.gpus)
    print_result(as_json, "plan", lambda: {**as_object(plan), "emit": {"kind": kind, "text": text}}, lambda: text)
    short = plan.sizes.recommended < plan.need.shm
    if plan.sizes.capped_by is not None:
        told = say(
            "the size is capped by {why}, below the need" if short else "the size is capped by {why}",
            why=plan.sizes.capped_by,
        )
        click.echo(remark_text(told), err=True)
    return 1 if short else 0
