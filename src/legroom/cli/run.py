"""`legroom run`: a training that is watched, told apart when it dies, and started again. Parses, calls, renders."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import click

from legroom.cli.params import DURATION
from legroom.errors import BadLimit, UsageError
from legroom.words import listed, say


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, required=True, metavar="[--] COMMAND...", type=click.UNPROCESSED)
@click.option("--retries", default=0, type=click.IntRange(0), metavar="N", help="Start again up to N times.")
@click.option("--flag", "flags", multiple=True, metavar="NAME=FLAG", help="Name a flag: batch=--my-batch.")
@click.option("--checkpoint", metavar="PATTERN", help="Where checkpoints are: 'ckpt/*.pt'.")
@click.option("--resume-flag", metavar="FLAG", help="How the script is told to resume: --resume.")
@click.option("--resume-existing", is_flag=True, help="Resume also from checkpoints older than this run.")
@click.option("--grace", default="30s", type=DURATION, help="From a passed-on SIGTERM to SIGKILL.")
@click.option(
    "--stall",
    default="60s",
    type=DURATION,
    help="End a job that hangs on a full /dev/shm for so long; 0: never.",
)
@click.option("--loader", type=click.Choice(["torch", "legroom"]), help="legroom: our DataLoader under it.")
@click.option("--gpu-limit", metavar="SHARE|SIZE", help="Of the card, for each process: 0.8, 1/6, 8GB.")
@click.option("--fresh", is_flag=True, help="Not with the settings that worked last.")
@click.option("--report", metavar="FILE", help="Write FILE.json and FILE.html.")
@click.option("--quiet", is_flag=True, help="Say nothing on stderr.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on stdout; the child's goes to stderr."
)
def command(words: tuple[str, ...], as_json: bool, quiet: bool, report: str | None, **options: Any) -> int:
    """Run a training, say which memory kills it, go on with less.

    Exits as the command does. With --retries it is started again after a
    memory death with safer settings, the effective batch kept, from the
    newest whole checkpoint.
    """
    from legroom.budget.findings import findings
    from legroom.probe.box import snapshot
    from legroom.rescue.flags import parse_named
    from legroom.rescue.injection import with_gpu_limit, with_loader
    from legroom.rescue.order import Order
    from legroom.rescue.report import as_object, write_report
    from legroom.rescue.supervisor import supervise

    def tell(line: str) -> None:
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
            fix = say(
                "--gpu-limit 0.8 or 80% is a share of the card, 1/6 that of one of six jobs, 20GB an amount"
            )
            raise BadLimit(refused.what, why=refused.why, fix=(fix,)) from refused
    if options["resume_flag"] and not options["checkpoint"]:
        raise click.UsageError(say("--resume-flag needs --checkpoint: resume from what?"))
    if options["resume_existing"] and not options["checkpoint"]:
        raise click.UsageError(say("--resume-existing needs --checkpoint: resume from what?"))
    order = Order(
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
        fresh=options["fresh"],
        quiet=quiet,
    )
    sys.stdout.flush()
    box = snapshot()
    for finding in findings(box):
        if finding.severity == "critical":
            tell(say("{code}: {message}", code=finding.code, message=finding.message))
    if options["gpu_limit"] is not None and not box.gpus.cards:
        tell(say("--gpu-limit does nothing here: {why}", why=box.gpus.reason or say("no GPU seen")))
    story = supervise(order, box, tell)
    if report is not None:
        try:
            tell(say("report: {names}", names=listed(write_report(story, report))))
        except OSError as problem:  # the folder went, the disk is full: still the command's own status
            tell(say("cannot write {path}: {why}", path=report, why=problem.strerror or problem))
    if as_json:
        click.echo(json.dumps(as_object(story), ensure_ascii=False))
    return story.ending.shell_status


def _writable(report: Path) -> None:
    """Refuse a report that could not be written, before a training of days rather than after it."""
    folder = report.absolute().parent
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise UsageError(
            say("cannot write {path}", path=report),
            why=say("it is a directory, or {folder} is not one that is yours to write in", folder=folder),
            fix=(say("name a file in a directory that exists"),),
        )
