"""The door: finds the verb, imports it, turns errors into words and exit statuses.

Covers: the table of verbs, lazy import, errors, closed pipes. Does not cover: any verb.

Exit 0: fine, warnings included. 1: the answer is no. 2: bad usage or bad input, or an answer that could not be written.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import click

from legroom.cli import streams
from legroom.cli.language import language_option, listen, open_streams, settle, translate
from legroom.errors import EXIT_USAGE, LegroomError
from legroom.version import VERSION
from legroom.words import phrase, say

# One line each, so that --help needs none of the modules.
VERBS = {
    "doctor": phrase("What is short on this box, why, and what to type about it."),
    "plan": phrase("How big a box GPUs × jobs need, and how many jobs fit this one."),
    "check": phrase("Whether this training fits here now, and the largest settings that fit."),
    "tune": phrase("Loader and batch settings that keep up at the least memory."),
    "watch": phrase("Memory over time: what fills, how fast, by whom, when it is full."),
    "run": phrase("Run a training, say which memory kills it, go on with less."),
    "explain": phrase("Which memory pool ran out, if one did, from a log alone."),
    "cache": phrase("One copy of a dataset for every process: load, look, remove."),
    "report": phrase("One file for a bug report, with what is private taken out."),
    "demo": phrase("What it does, measured on this machine in a minute or so."),
}
_HELP = "help"  # no verb: it is not among them in what it shows


is_program = False  # whether this process is the command line and nothing else


class Verbs(click.Group):
    """A group whose commands are imported when they are called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*VERBS, _HELP]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in VERBS and cmd_name != _HELP:
            return None
        command: click.Command = import_module(f"legroom.cli.{cmd_name}").command
        return translate(command)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as problem:
            import difflib

            near = difflib.get_close_matches(args[0], [*VERBS, _HELP], 1)
            if not near:
                raise
            raise click.UsageError(
                say("{message} Did you mean '{near}'?", message=problem.message, near=near[0]), ctx
            ) from problem

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(say("Verbs")):
            formatter.write_dl([(name, say(about)) for name, about in VERBS.items()])


@click.group(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(VERSION, "--version", "-V", prog_name="legroom")
@language_option
def cli() -> None:
    """Memory room for training: what will run out on this box, and what to do about it here.

    Every verb has --json. Sizes read and print as people write them: 64MB, 8G, 1.5GiB.
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    global is_program
    is_program = True
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    streams.hold()
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit status."""
    as_json = "--json" in arguments
    open_streams()
    settle(as_json=as_json)
    listen(cli, arguments, "legroom", as_json=as_json)
    translate(cli)
    try:
        status = _answer(arguments, as_json=as_json)
        sys.stdout.flush()
        return status
    except streams.NotWritten as lost:
        return _unwritten(lost.problem)


def _answer(arguments: list[str], *, as_json: bool) -> int:
    try:
        status = cli.main(
            arguments, prog_name="legroom", standalone_mode=False, obj="json" if as_json else None
        )
        return status if isinstance(status, int) else 0
    except LegroomError as error:
        _tell(error, as_json=as_json, verb=_verb(arguments))
        return error.exit_status
    except click.ClickException as problem:
        problem.show()
        return EXIT_USAGE
    except click.Abort:
        click.echo(say("stopped"), err=True)
        return 130


def _verb(arguments: list[str]) -> str:
    """The verb as its JSON names it: ``doctor``, ``cache.list``."""
    words = [word for word in arguments if not word.startswith("-")]
    while words and words[0] not in VERBS:  # the value of an option before the verb
        del words[0]
    return ".".join(words[:2] if words[:1] == ["cache"] else words[:1])


def _tell(error: LegroomError, *, as_json: bool, verb: str) -> None:
    if as_json:
        import json

        click.echo(json.dumps({"schema": f"legroom.{verb}/1", "error": error.as_dict()}, ensure_ascii=False))
    click.echo(f"legroom: {error}", err=True)


def _unwritten(problem: OSError) -> int:
    """The status where standard output failed."""
    streams.leave(sys.stdout)
    if isinstance(problem, BrokenPipeError):
        return 0  # whoever read us has had enough (`| head`)
    refused = streams.not_written(problem)
    click.echo(f"legroom: {refused}", err=True)
    return refused.exit_status
