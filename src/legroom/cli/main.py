"""The entry point: import a command when it is called, print errors, choose the exit status.

Exit status 0: success, warnings included. 1: the answer is no. 2: bad usage, bad input, or output that could not be
written.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib import import_module

import click

from legroom.cli.help import HelpContext
from legroom.cli.language_and_streams import (
    NotWritten,
    apply_language,
    error_columns,
    error_text,
    escape_unencodable,
    explain_extra_arguments,
    fall_back_to_english,
    guard_streams,
    integer_refused,
    language_option,
    remark_text,
    status_after,
    translate,
    translate_click,
    usage_text,
)
from legroom.errors import EXIT_USAGE, LegroomError, UnreadableSource, UsageError
from legroom.messages import phrase, say
from legroom.version import VERSION

# One line each, so that `legroom --help` imports none of the commands.
COMMANDS = {
    "doctor": phrase("Check the memory limits on this machine and suggest fixes."),
    "plan": phrase(
        "Estimate the /dev/shm and RAM that your jobs need, and how many jobs fit. The RAM estimate is complete "
        "only with --measure, --match, or --process-ram and --params; GPU memory is checked only with --gpu-memory."
    ),
    "check": phrase("Predict whether a DataLoader fits in the free /dev/shm and RAM; print settings that fit."),
    "tune": phrase(
        "Estimate the fastest DataLoader settings that fit in the free /dev/shm and RAM; with --benchmark, time the "
        "DataLoader instead of estimating. For torch's DataLoader, add --loader torch."
    ),
    "watch": phrase(
        "Monitor memory: what is filling up, how fast, which process is filling it, and when it will be full."
    ),
    "run": phrase(
        "Run a command and diagnose out-of-memory failures; with --retries, restart it with settings that use less "
        "memory."
    ),
    "leak": phrase("Run a command and name the lines of its Python code that make memory grow."),
    "explain": phrase(
        "Read a log file and diagnose what ran out: /dev/shm, RAM, GPU memory, file descriptors or disk."
    ),
    "cache": phrase("Share one copy of a dataset between processes: load, list, remove."),
    "nodes": phrase("Load, list and remove cached data, and check memory limits, on every node of a Ray cluster."),
    "report": phrase(
        "Write a file for a bug report about Legroom; recognized names and secrets are replaced with placeholders."
    ),
    "demo": phrase("Demonstrate Legroom on this machine with real measurements, in about a minute."),
}
_HELP = "help"  # a command that the list of commands leaves out


is_program = False  # whether this process runs the command line and nothing else


class Commands(click.Group):
    """A group whose commands are imported when they are called."""

    context_class = HelpContext

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS, _HELP]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS and cmd_name != _HELP:
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

            near = difflib.get_close_matches(args[0], [*COMMANDS, _HELP], 1)
            if not near:
                raise
            raise click.UsageError(
                say("{message} Did you mean '{near}'?", message=problem.message, near=near[0]), ctx
            ) from problem

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section(say("Commands")):
            formatter.write_dl([(name, say(about)) for name, about in COMMANDS.items()])


def _print_version(ctx: click.Context, param: click.Parameter, value: bool) -> None:
    if value and not ctx.resilient_parsing:
        click.echo(f"legroom, version {VERSION}", color=ctx.color)
        ctx.exit()


# Not click.version_option: it translates its help at import, and for that searches the disk for catalogues.
@click.group(cls=Commands, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--version",
    "-V",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=_print_version,
    help="Show the version and exit.",
)
@language_option
def cli() -> None:
    """Memory tools for PyTorch training: share datasets, predict /dev/shm and RAM use, diagnose crashes.

    Every command has --json. In sizes, 64M, 64MB and 64MiB all mean 64 × 1024² bytes, as in docker and df -h. This
    holds for sizes that you give and for sizes in the output. (In Kubernetes, 64M means 64 × 1000².)
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit."""
    global is_program
    is_program = True
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    guard_streams()
    sys.exit(run(arguments))


def run(arguments: list[str]) -> int:
    """Run the command line; the exit status."""
    own = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in own
    escape_unencodable()
    fall_back_to_english(as_json=as_json)
    translate_click()  # in English too: gettext would search the disk for catalogues that click does not have
    dropped = apply_language(cli, arguments, "legroom", as_json=as_json)
    if dropped is not None and "--quiet" not in own:
        click.echo(remark_text(dropped), err=True)
    translate(cli)
    try:
        status = _run_command(arguments, as_json=as_json)
        sys.stdout.flush()
        return status
    except NotWritten as lost:
        return status_after(lost.problem)


def _run_command(arguments: list[str], *, as_json: bool) -> int:
    try:
        status = cli.main(arguments, prog_name="legroom", standalone_mode=False, obj="json" if as_json else None)
        return status if isinstance(status, int) else 0
    except LegroomError as error:
        return _refuse(error, arguments, as_json=as_json)
    except click.ClickException as problem:
        if (refused := integer_refused(problem)) is not None:
            return _refuse(refused, arguments, as_json=as_json)
        problem = explain_extra_arguments(problem)
        if isinstance(problem, click.NoSuchOption):
            from legroom.cli.options import explain_option_before_command

            problem = explain_option_before_command(problem, arguments)
        if as_json:
            _print_json(UsageError(problem.format_message()), _command_name(arguments))
        _wrapped(problem).show()
        return EXIT_USAGE
    except (OSError, MemoryError, RecursionError) as problem:  # no command expects them
        return _refuse(_unexpected(problem), arguments, as_json=as_json)
    except click.Abort:
        click.echo(say("stopped"), err=True)
        return 130


def _unexpected(problem: Exception) -> LegroomError:
    """An error with the line of code that raised it, which a bug report needs."""
    import traceback

    try:
        os.getcwd()
    except FileNotFoundError:
        return UnreadableSource(
            say("the working directory does not exist"),
            why=say("it was removed after this shell had changed to it"),
            fix=(say('change to a directory that exists; if it was made again, to the same one:\ncd "$PWD"'),),
        )
    at = traceback.extract_tb(problem.__traceback__)[-1]
    return LegroomError(
        f"{type(problem).__name__}: {problem}",
        why=f'File "{at.filename}", line {at.lineno}, in {at.name}',
        fix=(say("if nothing on this machine explains it, write a file for a bug report:\nlegroom report"),),
    )


def _refuse(error: LegroomError, arguments: list[str], *, as_json: bool) -> int:
    """Print an error with the options of the command."""
    from legroom.cli.options import in_options

    in_options(error, _command(arguments), _command_name(arguments))
    _print_error(error, as_json=as_json, command=_command_name(arguments))
    return error.exit_status


def _command_name(arguments: list[str]) -> str:
    """The command as its JSON schema names it: ``doctor``, ``cache.list``."""
    return ".".join(name for name, _ in _commands(arguments))


def _command(arguments: list[str]) -> click.Command:
    """The command that the arguments name, or the group before the first name that is unknown."""
    return [("", cli), *_commands(arguments)][-1][1]


def _commands(arguments: list[str]) -> list[tuple[str, click.Command]]:
    """The commands that the arguments name, such as ``cache`` and ``list``; values of options before them are none."""
    found: list[tuple[str, click.Command]] = []
    group: click.Command = cli
    for word in arguments:
        if isinstance(group, click.Group) and (command := group.get_command(click.Context(group), word)) is not None:
            found.append((word, command))
            group = command
    return found


def _print_error(error: LegroomError, *, as_json: bool, command: str) -> None:
    if as_json:
        _print_json(error, command)
    click.echo(error_text(error, error_columns()), err=True)


def _wrapped(problem: click.ClickException) -> click.ClickException:
    """click's error with its message wrapped, where stderr is a terminal."""
    columns = error_columns()
    if columns is None or type(problem).__name__ == "NoArgsIsHelpError":  # the message of that one is the help
        return problem
    return click.UsageError(usage_text(problem.format_message(), columns), getattr(problem, "ctx", None))


def _print_json(error: LegroomError, command: str) -> None:
    import json

    schema = f"legroom.{command}/1" if command else "legroom/1"
    click.echo(json.dumps({"schema": schema, "error": error.as_dict()}, ensure_ascii=False))
