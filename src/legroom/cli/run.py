"""`legroom run`: supervise a command, diagnose its failure, retry; its text and JSON output."""

from __future__ import annotations

import json
import os
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import click

from legroom.cli.language_and_streams import message_printer
from legroom.cli.options import AT_LEAST_0, DURATION
from legroom.cli.text_layout import width
from legroom.errors import BadLimit
from legroom.messages import listed, say
from legroom.system.argument_checks import refuse_unwritable

# Options that have no effect without another one.
_NEEDS = (
    ("resume_flag", "retries"), ("resume_existing", "retries"), ("fresh", "retries"),
    ("resume_flag", "checkpoint"), ("resume_existing", "resume_flag"),
)  # fmt: skip


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, metavar="[--] COMMAND...", type=click.UNPROCESSED)
@click.option(
    "--retries",
    default=0,
    show_default=True,
    type=AT_LEAST_0,
    metavar="N",
    help="After an out-of-memory failure, restart up to N times with settings that use less memory. To change a "
    "setting, Legroom needs its flag: one in COMMAND that it knows, such as --num_workers, or one that you name with "
    "--flag. To lower the batch size, it must also know the flag for gradient accumulation. If it knows no flag at "
    "all, it lowers settings only in a script that calls legroom.tune. Replacing the DataLoader (see --loader) needs "
    "no flag.",
)
@click.option(
    "--flag",
    "flags",
    multiple=True,
    metavar="SETTING=FLAG",
    help="Name the script's flag for SETTING if Legroom does not know it, for example batch=--bs (with --retries). "
    "SETTING is batch, accumulation, workers, prefetch, pin_memory or low_memory. low_memory: a flag of the script, if "
    "it has one, that makes it read data on demand instead of keeping a copy in each process. accumulation=--acc=16: "
    "the flag is --acc, and the script's default is 16. Can be given several times.",
)
@click.option(
    "--checkpoint",
    metavar="PATTERN",
    help="Checkpoint files as a glob pattern: 'ckpt/*.pt' (with --resume-flag and --retries). Without --retries, this "
    "only adds their disk to the disks that are monitored.",
)
@click.option(
    "--resume-flag",
    metavar="FLAG",
    help="The script's flag for resuming from a checkpoint, such as --resume (with --checkpoint and --retries).",
)
@click.option(
    "--resume-existing",
    is_flag=True,
    help="Let a restart resume even from a checkpoint that is older than this run (with --checkpoint, --resume-flag "
    "and --retries).",
)
@click.option(
    "--grace",
    type=DURATION,
    metavar="TIME",
    help="After SIGTERM, SIGINT, SIGHUP or SIGQUIT, wait this long for the command to exit, then send SIGKILL.  "
    "[default: 30s]",
)
@click.option(
    "--stall",
    type=DURATION,
    metavar="TIME",
    help="Report a job that has hung on a full /dev/shm for this long. With --retries, also stop and restart it. "
    "0: do neither.  [default: 60s]",
)
@click.option(
    "--loader",
    type=click.Choice(["torch", "legroom"]),
    help="legroom: replace torch's DataLoader in the script with Legroom's. torch: never replace it. Default: with "
    "--retries, replace it if /dev/shm was full and no other change helped.",
)
@click.option(
    "--gpu-limit",
    metavar="FRACTION|SIZE",
    help="Limit the GPU memory of each process, CUDA context included: 0.8 or 1/6 of the GPU's memory, or 8GB. If the "
    "limit cannot be set, a warning is printed and the script runs without a limit.  [default: no limit]",
)
@click.option(
    "--leak", is_flag=True, help="Print at the end which lines of Python code make memory grow (see legroom leak)."
)
@click.option(
    "--fresh", is_flag=True, help="Do not start with the lower settings that an earlier run needed (with --retries)."
)
@click.option(
    "--report",
    metavar="FILE",
    help="Write a report of all attempts to FILE.json and FILE.html; the suffixes are added.",
)
@click.option("--quiet", is_flag=True, help="Do not print Legroom's messages on stderr.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; the command's stdout goes to stderr."
)
def command(words: tuple[str, ...], as_json: bool, quiet: bool, report: str | None, **options: Any) -> int:
    """Run a command and diagnose out-of-memory failures; with --retries, restart it with settings that use less memory.

    Exits with the command's status. A restart keeps the effective batch size.
    With --checkpoint and --resume-flag, a restart resumes from the newest
    complete checkpoint written during this run.
    """
    from legroom.advice.findings import findings
    from legroom.cli.leak import read_report, records_directory
    from legroom.leak.leak_report import report_lines, report_object
    from legroom.probe.snapshot import snapshot
    from legroom.rescue.find_command import refuse_expanded_pattern
    from legroom.rescue.job_attempt import RunOptions
    from legroom.rescue.job_process import with_gpu_limit, with_leak, with_loader
    from legroom.rescue.retry_settings import parse_named
    from legroom.rescue.run_report import run_object, write_report
    from legroom.rescue.supervisor import supervise

    print_line = message_printer(quiet)
    if report is not None:
        _require_writable(report)
    environment = dict(os.environ)
    if options["loader"] == "legroom":
        environment = with_loader(environment)
    if options["gpu_limit"] is not None:
        try:
            environment = with_gpu_limit(environment, options["gpu_limit"])
        except BadLimit as refused:  # its own advice is for Python
            fix = say("write --gpu-limit as a share of GPU memory (0.8, 80%, 1/6) or an amount (20GB)")
            raise BadLimit(refused.what, why=refused.why, fix=(fix,)) from refused
    if options["leak"] and quiet and not as_json:
        raise click.UsageError(say("--leak cannot be combined with --quiet, unless --json is given"))
    for name, other in _NEEDS:
        if options[name] and not options[other]:
            needs = {"option": f"--{name.replace('_', '-')}", "other": f"--{other.replace('_', '-')}"}
            raise click.UsageError(say("{option} needs {other}", **needs))
    refuse_expanded_pattern("--checkpoint", options["checkpoint"], words[0])
    run_options = RunOptions(
        command=words,
        retries=options["retries"],
        named=tuple(parse_named(text) for text in options["flags"]),
        checkpoint=options["checkpoint"],
        resume_flag=options["resume_flag"],
        resume_existing=options["resume_existing"],
        environment=environment,
        stdout=2 if as_json else 1,
        replaces_loader=options["loader"] is None,
        fresh=options["fresh"],
        quiet=quiet,
        **{name: options[name] for name in ("grace", "stall") if options[name] is not None},
    )
    sys.stdout.flush()
    machine = snapshot()
    for finding in findings(machine):
        if finding.severity == "critical":
            print_line(say("{name}: {why}", name=finding.code, why=finding.message))
    if options["gpu_limit"] is not None and not machine.gpus.cards:
        print_line(say("--gpu-limit has no effect here: {why}", why=machine.gpus.reason or say("no GPU found")))
    if options["checkpoint"] and not options["retries"]:
        print_line(
            say("--checkpoint without --retries only monitors the disk of the checkpoints; the job is not restarted")
        )
    elif options["checkpoint"] and not options["resume_flag"]:
        print_line(
            say("--checkpoint without --resume-flag: a restart does not pass the checkpoint to the script, which must "
                "find it by itself")
        )  # fmt: skip
    flag = options["resume_flag"] or ""
    if flag and not flag.startswith("-") and "=" not in flag and "{}" not in flag:
        print_line(
            say("--resume-flag {flag} has no dashes: a restart adds the word {flag} and the path. For a flag, give "
                "--resume-flag {dashed}", flag=flag, dashed=f"--{flag}")
        )  # fmt: skip
    if options["flags"] and not options["retries"]:
        print_line(
            say(
                "--flag without --retries changes no setting; the values of these flags only appear in the JSON output "
                "and the report"
            )
        )
    with ExitStack() as stack:
        if options["leak"]:
            records = stack.enter_context(records_directory(None))
            run_options = replace(run_options, environment=with_leak(environment, records))
        supervised = supervise(run_options, machine, print_line)
        growth = read_report(records, words) if options["leak"] else None
    if growth is not None and not quiet:
        for line in report_lines(growth, width()):
            click.echo(line, err=True)
    if report is not None:
        try:
            print_line(say("report: {names}", names=listed(write_report(supervised, report))))
        except OSError as problem:  # the directory is gone or the disk is full: keep the command's status
            print_line(say("cannot write {path}: {why}", path=report, why=problem.strerror or problem))
    if as_json:
        found = run_object(supervised)
        if growth is not None:
            found["leak"] = report_object(growth)
        click.echo(json.dumps(found, ensure_ascii=False))
    return supervised.ending.shell_status


def _require_writable(report: str) -> None:
    """Refuse a report path that cannot be written before the job starts, not days later."""
    from legroom.rescue.run_report import report_paths

    if os.path.basename(report) in ("", ".", ".."):  # the files would be named .json or ..json
        refuse_unwritable(report, report)
    refuse_unwritable(report, *report_paths(report))
