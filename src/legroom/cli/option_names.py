"""Errors with the options that the user typed in place of Python arguments: ``num_workers=0`` becomes ``--workers 0``.

The library raises them with the words of Python. The entry point translates them for the command that was run, and
explains an option of a command that stands before the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence

import click

from legroom.errors import CommandNotFound, CommandNotRunnable, DatasetFailed, LegroomError
from legroom.messages import say

# Arguments of the library whose options have another name.
_RENAMED = {
    "num_workers": "--workers", "prefetch_factor": "--prefetch", "batch_size": "--batch", "collate_fn": "--collate",
    "gpu_bytes": "--gpu-memory",
}  # fmt: skip
# name='value', name=[values], name=value, or name= alone; not in a URL, a path, a call, quotes, or NAME=VALUE of --set.
_ARGUMENT = re.compile(
    r"(?<![\w?&/.\-(='\"])(?<!--set )([a-z]\w*)=(?:'([^']*)'|\[([^\]]*)\]|([\w.]+)(?![\w/])|(?![\w'\"\[(]))"
)
_SUBJECT = re.compile(r"[a-z]\w*(?= (?:must be|必须))")  # of the sentences of argument_checks


def in_options(error: LegroomError, command: click.Command) -> None:
    """Replace arguments in the error's sentences by options of the command."""
    if isinstance(error, (CommandNotFound, CommandNotRunnable)):  # they quote the user's command
        return
    error.what, why, error.fix = translated(command, error.what, error.why, error.fix)
    if not isinstance(error, DatasetFailed):  # its reason quotes the user's code
        error.why = why


def translated(command: click.Command, what: str, why: str, fix: Sequence[str]) -> tuple[str, str, tuple[str, ...]]:
    """The sentences of an error with the options of the command."""
    options = _options(command)
    subject = _SUBJECT.match(what)
    if subject is not None and subject[0] in options:
        what = _first(options[subject[0]]) + what[subject.end() :]
    replace = _replacement(options)

    return _ARGUMENT.sub(replace, what), _ARGUMENT.sub(replace, why), tuple(_ARGUMENT.sub(replace, one) for one in fix)


def note_in_options(note: str) -> str:
    """A note of the library with the options of the command that is running."""
    context = click.get_current_context(silent=True)
    return note if context is None else _ARGUMENT.sub(_replacement(_options(context.command)), note)


def _options(command: click.Command) -> dict[str, click.Option]:
    """The command's options by the name of the argument in Python."""
    options = [one for one in command.params if isinstance(one, click.Option)]
    found = {word.lstrip("-").replace("-", "_"): one for one in options for word in one.opts}
    for name, word in _RENAMED.items():
        if (one := found.get(word.lstrip("-").replace("-", "_"))) is not None:
            found[name] = one
    return found


def _first(option: click.Option) -> str:
    return option.opts[0]


def _replacement(options: dict[str, click.Option]) -> Callable[[re.Match[str]], str]:
    def option_text(found: re.Match[str]) -> str:
        name, quoted, several, plain = found.groups()
        if plain in ("True", "False"):
            flag = options.get(name if plain == "True" else f"no_{name}")
            return _first(flag) if flag is not None and flag.is_flag else found[0]
        option = options.get(name)
        value = quoted if quoted is not None else plain
        if option is None or option.is_flag:
            return found[0]
        if several is not None:
            names = [one.strip().strip("'\"") for one in re.split("[,、]", several)]
            return f"{_first(option)} " + ("NAME,…" if names == ["…"] else shlex.quote(",".join(names)))
        if value is None:
            return _first(option)
        if isinstance(option.type, click.Choice) and value not in option.type.choices:
            return found[0]  # the same name for something else
        return f"{_first(option)} {shlex.quote(value)}"

    return option_text


def explain_option_before_command(problem: click.NoSuchOption, arguments: Sequence[str]) -> click.UsageError:
    """That error with a command line that works, where an option of a command stands before the command."""
    ctx, option = problem.ctx, problem.option_name
    if ctx is None or not isinstance(ctx.command, click.Group):
        return problem
    found = _with_option_moved(ctx, option, arguments) or next(
        (f"{ctx.command_path} {name} {option}" for name in ctx.command.list_commands(ctx)
         if _has(ctx.command.get_command(ctx, name), option)), None,
    )  # fmt: skip
    if found is None:
        return problem
    return click.UsageError(say("{option} goes after the command: {line}", option=option, line=found), ctx)


def _with_option_moved(ctx: click.Context, option: str, arguments: Sequence[str]) -> str | None:
    """The command line with the command's name first; None where no command in it has the option."""
    words = list(arguments[: arguments.index("--")] if "--" in arguments else arguments)
    names = ctx.command_path.split()[1:]  # the groups before the option
    places = {words.index(name) for name in names}
    command: click.Command = ctx.command
    for place, word in enumerate(words):
        if place in places or not isinstance(command, click.Group):
            continue
        inner = command.get_command(ctx, word)
        if isinstance(inner, click.Group) or _has(inner, option):  # another name may be the value of an option
            assert inner is not None
            command = inner
            places.add(place)
            names.append(word)
    if not _has(command, option):
        return None
    rest = [word for place, word in enumerate(arguments) if place not in places]
    return shlex.join([ctx.find_root().command_path, *names, *rest])


def _has(command: click.Command | None, option: str) -> bool:
    return command is not None and any(option in (*one.opts, *one.secondary_opts) for one in command.params)
