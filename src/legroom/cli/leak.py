"""`legroom leak`: run a command and name the lines that make its memory grow; its text, JSON and page."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import click

from legroom.cli.language_and_streams import message_printer
from legroom.cli.options import WithEarlierNames, refuse_beside
from legroom.cli.text_layout import width
from legroom.errors import EXIT_USAGE, UnreadableSource, UsageError
from legroom.messages import say

if TYPE_CHECKING:
    from legroom.records.memory_growth import LeakReport

_PRIVATE = 0o700


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.argument("words", nargs=-1, metavar="[--] COMMAND...", type=click.UNPROCESSED)
@click.option(
    "--html",
    "--page",
    "page",
    cls=WithEarlierNames,
    metavar="FILE",
    help="Write an HTML report with a chart over training steps to FILE; FILE must end in .html.",
)
@click.option(
    "--records", metavar="DIR", help="Save the measurements of all processes in DIR, a new or empty directory."
)
@click.option(
    "--read",
    metavar="DIR",
    help="Report on the measurements in DIR (saved with --records) instead of running a COMMAND. The job may still be "
    "running.",
)
@click.option("--quiet", is_flag=True, help="Print only the report, not Legroom's other messages.")
@click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object on stdout; the command's stdout goes to stderr."
)
def command(
    words: tuple[str, ...], page: str | None, records: str | None, read: str | None, quiet: bool, as_json: bool
) -> int:
    """Run a command and name the lines of its Python code that make memory grow.

    At the end, prints each line that makes memory grow, with the type of the
    objects, the bytes per training step, the step at which the growth began, the
    time until memory is full, and a confidence. Exits with the command's status; with 2 if that is 0 and the HTML
    report could not be written.
    """
    if words and read is not None:
        raise click.UsageError(say("{option} cannot be combined with {others}", option="--read", others="COMMAND"))
    if not words and read is None:
        raise click.UsageError(say("give a command to run, or --read DIR"))
    refuse_beside("read", {"records"})
    if page is not None:
        from legroom.charts.drawing import check_path

        check_path(page, (".html",))
    if read is not None:
        _require_records(read)
        written = show_report(read, (), page, as_json=as_json, to_stdout=True, quiet=quiet)
        return 0 if written else EXIT_USAGE

    from legroom.probe.snapshot import snapshot
    from legroom.rescue.job_attempt import RunOptions
    from legroom.rescue.job_process import with_leak
    from legroom.rescue.supervisor import supervise

    print_line = message_printer(quiet)
    with records_directory(records) as directory:
        sys.stdout.flush()
        options = RunOptions(
            command=words,
            environment=with_leak(os.environ, directory),
            stdout=2 if as_json else 1,
            replaces_loader=False,
            quiet=quiet,
        )
        supervised = supervise(options, snapshot(), print_line)
        status = supervised.ending.shell_status
        written = show_report(directory, words, page, as_json=as_json, status=status, quiet=quiet)
    return status if status or written else EXIT_USAGE


def _require_records(directory: str) -> None:
    from legroom.leak.record_files import read_directory

    there = Path(directory).is_dir()
    if not there or not read_directory(directory):
        raise UnreadableSource(
            say("cannot read the records in {path}", path=directory),
            why=say("it contains no records of a process") if there else say("it is not a directory"),
            fix=(say("pass the directory given to legroom leak --records, a few seconds after the job started"),),
        )


@contextmanager
def records_directory(asked: str | None) -> Iterator[str]:
    """A directory for the records of all processes: the one that was asked for, or one that is removed at the end."""
    if asked is not None:
        folder = Path(asked)
        try:
            folder.mkdir(mode=_PRIVATE, exist_ok=True)
            used = any(folder.iterdir()) or not os.access(folder, os.W_OK)
        except OSError as problem:
            raise _unusable(asked, problem.strerror or str(problem)) from problem
        if used:
            raise _unusable(asked, say("it is not empty, or not writable"))
        yield str(folder.absolute())
        return
    temporary = tempfile.mkdtemp(prefix="legroom-leak-")
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _unusable(path: str, why: str) -> UsageError:
    return UsageError(say("cannot keep records in {path}", path=path), why=why, fix=(say("name a new directory"),))


def show_report(
    directory: str,
    words: Sequence[str],
    page: str | None,
    *,
    as_json: bool,
    status: int | None = None,
    to_stdout: bool = False,
    quiet: bool = False,
) -> bool:
    """Diagnose the records and print or write the report; whether the page could be written, where one is asked for."""
    report = read_report(directory, words)
    if as_json:
        from legroom.leak.leak_report import report_object

        found = report_object(report)
        click.echo(json.dumps(found if status is None else {**found, "exit": status}, ensure_ascii=False))
    else:
        from legroom.leak.leak_report import report_lines

        for line in report_lines(report, width()):
            click.echo(line, err=not to_stdout)
    if page is not None:
        from legroom.leak.leak_report import leak_page
        from legroom.system.atomic_file import replace_file

        try:
            replace_file(page, leak_page(report))
            message_printer(quiet)(say("page written to {path}", path=page))
        except OSError as problem:  # the directory is gone or the disk is full: the caller's status shows it
            message_printer(quiet=False)(say("cannot write {path}: {why}", path=page, why=problem.strerror or problem))
            return False
    return True


def read_report(directory: str, words: Sequence[str]) -> LeakReport:
    """The report of the records in a directory."""
    from legroom.leak.find_leaking_lines import diagnose
    from legroom.leak.record_files import read_directory

    return diagnose(read_directory(directory), words)
