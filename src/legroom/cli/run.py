"""`legroom run`: supervise a command, diagnose its failure, retry with lower settings; its text and JSON output."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from legroom.cli.options import DURATION
from legroom.errors import BadLimit, UsageError
from legroom.words import listed, say


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, metavar="[--] COMMAND...", type=click.UNPROCESSED)
@click.option(
    "--retries",
    default=0,
    type=click.IntRange(0),
    metavar="N",
    help="Retry up to N times after an out-of-memory failure.",
)
@click.option(
    "--flag",
    "flags",
    multiple=True,
    metavar="NAME=FLAG",
    help="Name the script's flag for a setting: batch=--my-batch.",
)
@click.option("--checkpoint", metavar="PATTERN", help="Pattern of checkpoint files: 'ckpt/*.pt'.")
@click.option(
    "--resume-flag", metavar="FLAG", help="Flag that makes the script resume from a checkpoint: --resume."
)
@click.option("--resume-existing", is_flag=True, help="Also resume from checkpoints older than this run.")
@click.option("--grace", default="30s", type=DURATION, help="Grace period before SIGKILL.")
@click.option(
    "--stall",
    default="60s",
    type=DURATION,
    help="Stop a job stalled on a full /dev/shm (0 disables).",
)
@click.option(
    "--loader",
    type=click.Choice(["torch", "legroom"]),
    help="legroom: replace torch's DataLoader in the script.",
)
@click.option("--gpu-limit", metavar="SHARE|SIZE", help="GPU memory limit per process: 0.8, 1/6, 8GB.")
@click.option("--fresh", is_flag=True, help="Ignore remembered settings.")
@click.option("--report", metavar="FILE", help="Write FILE.json and FILE.html.")
@click.option("--quiet", is_flag=True, help="Do not print Legroom's messages on stderr.")
@click.option(
    "--json",
    "as_json",
    is_flag=True,
    help="Print one JSON object on stdout; the command's stdout goes to stderr.",
)
def command(words: tuple[str, ...], as_json: bool, quiet: bool, report: str | None, **options: Any) -> int:
    """Run a command; diagnose out-of-memory failures and retry with lower settings.

    Exits with the command's status. With --retries, a command that ran out of
    memory is restarted with lower settings and the same effective batch size.
    With --checkpoint and --resume-flag it resumes from the newest complete
    checkpoint.
    """
    from legroom.advice.findings import findings
    from legroom.probe.snapshot import snapshot
    from legroom.rescue.command_line import parse_named, with_gpu_limit, with_loader
    from legroom.rescue.job_attempt import RunOptions
    from legroom.rescue.run_report import run_object, write_report
    from legroom.rescue.supervisor import supervise

    def print_line(line: str) -> None:
        if not quiet:
            click.echo(f"legroom: {line}", err=True)

    if report is not None:
        _writable(Path(report))
    environment = dict(os.environ)
    if options["loader"] == "legroom":
        environment = with_loader(environment)
    if options["gpu_limit"] is not None:
        try:
            environment = with_gpu_limit(environment, options["gpu_limit"])
        except BadLimit as refused:  # its own advice is for Python
            fix = say("write --gpu-limit as a share of the GPU (0.8, 80%, 1/6) or an amount (20GB)")
            raise BadLimit(refused.what, why=refused.why, fix=(fix,)) from refused
    if options["resume_flag"] and not options["checkpoint"]:
        raise click.UsageError(say("--resume-flag needs --checkpoint"))
    if options["resume_existing"] and not options["checkpoint"]:
        raise click.UsageError(say("--resume-existing needs --checkpoint"))
    run_options = RunOptions(
        command=words,
        retries=options["retries"],
        named=tuple(parse_named(text) for text in options["flags"]),
        checkpoint=options["checkpoint"],
        resume_flag=options["resume_flag"],
        resume_existing=options["resume_existing"],
        grace=options["grace"],
        stall=options["stall"],
        environment=environment,
        stdout=2 if as_json else 1,
        replaces_loader=options["loader"] is None,
        fresh=options["fresh"],
        quiet=quiet,
    )
    sys.stdout.flush()
    box = snapshot()
    for finding in findings(box):
        if finding.severity == "critical":
            print_line(say("{code}: {message}", code=finding.code, message=finding.message))
    if options["gpu_limit"] is not None and not box.gpus.cards:
        print_line(say("--gpu-limit has no effect here: {why}", why=box.gpus.reason or say("no GPU found")))
    supervised = supervise(run_options, box, print_line)
    if report is not None:
        try:
            print_line(say("report: {names}", names=listed(write_report(supervised, report))))
        except OSError as problem:  # the directory is gone or the disk is full: keep the command's status
            print_line(say("cannot write {path}: {why}", path=report, why=problem.strerror or problem))
    if as_json:
        click.echo(json.dumps(run_object(supervised), ensure_ascii=False))
    return supervised.ending.shell_status


def _writable(report: Path) -> None:
    """Refuse a report path that cannot be written before the job starts, not days later."""
    folder = report.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            say("cannot write {path}", path=report),
            why=say("it is a directory, or {folder} is not a writable directory", folder=folder),
            fix=(say("give a file in an existing, writable directory"),),
        )
