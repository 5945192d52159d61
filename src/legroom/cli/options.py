"""Argument types and options that several commands share; errors with options in place of Python arguments.

The types are sizes, durations, cache entries and a job's description. Options that would have no effect beside others,
or without them, are refused.

The library raises errors with the words of Python: ``num_workers=0`` becomes ``--workers 0``. The entry point
translates them for the command that was run, and explains an option of a command that stands before the command.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from legroom.advice.job_settings_to_workload import DTYPES, OPTIMIZERS
from legroom.errors import CommandNotFound, CommandNotRunnable, DatasetFailed, LegroomError, UsageError
from legroom.messages import listed, say
from legroom.units import parse_count, parse_duration, parse_size

if TYPE_CHECKING:
    ParamType = click.ParamType[Any]
else:  # a parameter of the class is an error in older releases of click
    ParamType = click.ParamType


class Measure(ParamType):
    """A size or duration with a unit."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except UsageError as problem:
            self.fail(say("{name}: {why}", name=problem.what, why=problem.fix[0]), param, ctx)


_LEAST_BARE = 4096  # bytes: of a smaller number, a unit has probably been forgotten


def _size(text: Any) -> int:
    """A size in bytes; a small number without a unit is refused: 64 would be 64 bytes."""
    size = parse_size(text)
    if isinstance(text, str) and 0 < size < _LEAST_BARE and text.strip().replace(".", "", 1).isdecimal():
        number = text.strip()
        raise UsageError(
            say("{number} has no unit", number=number),
            fix=(say("write {number}MB, or {number}B for bytes", number=number),),
        )
    return size


def _duration_with_unit(text: Any) -> float:
    """A duration for a command that removes data: a number without a unit is refused, since 7 may mean days."""
    duration = parse_duration(text)
    bare = re.search(r"[0-9.]+$", str(text).strip())
    if bare is not None and isinstance(text, str) and duration > 0:
        number = bare[0]
        raise UsageError(
            say("{number} has no unit", number=number),
            fix=(say("write {number}d for days, or {number}s for seconds", number=number),),
        )
    return duration


SIZE = Measure("size", _size)
DURATION = Measure("duration", parse_duration)  # a bare number is seconds
DURATION_WITH_UNIT = Measure("duration", _duration_with_unit)


AT_LEAST_0, AT_LEAST_1 = click.IntRange(0), click.IntRange(1)  # refused in the words of integer_refused


class EntryName(ParamType):
    """A file or the ID of a cache entry; shell completion lists the IDs in the cache."""

    name = "file|id"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        from legroom.cache.list_and_verify import entries

        try:
            found = entries()
        except LegroomError:
            return []
        keys = [
            CompletionItem(entry.key, help=entry.sources[0] if entry.sources else None)
            for entry in found
            if entry.key is not None and entry.key.startswith(incomplete)
        ]
        return [*keys, CompletionItem(incomplete, type="file")]


class Count(ParamType):
    """A number of parameters: 125M, 1.5B."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return value if isinstance(value, int) else parse_count(value)
        except UsageError as problem:
            self.fail(problem.what, param, ctx)


COUNT = Count()


json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
root_option = click.option(
    "--root", default="/", metavar="DIR", help="Read /proc and /sys under DIR instead of /, for example /host."
)
timeout_option = click.option(
    "--timeout", type=DURATION, default=60.0, metavar="TIME", help="Time limit for measuring.  [default: 60s]"
)
# Of the cache.
keys_option = click.option("--keys", metavar="NAME,…", help="Load only these arrays, groups or columns.")
backing_option = click.option(
    "--backing", type=click.Choice(["auto", "shm", "disk"]), default="auto", show_default=True,
    help="Keep the copy in /dev/shm or on disk; auto: in /dev/shm if it fits.",
)  # fmt: skip
revalidate_option = click.option(
    "--revalidate",
    is_flag=True,
    help="Always ask the server whether the data at a URL has changed (default: at most once a minute).",
)
force_option = click.option(
    "--force", is_flag=True, help="Also remove entries in use; processes that have mapped them can still read them."
)


class WithEarlierNames(click.Option):
    """An option whose help shows its first name. The others are accepted too."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        shown = copy(self)
        shown.opts = self.opts[:1]
        return click.Option.get_help_record(shown, ctx)


_COUNT: dict[str, Any] = {"type": AT_LEAST_0, "metavar": "N"}
_COUNT_1: dict[str, Any] = {**_COUNT, "type": AT_LEAST_1}
_COUNT_OF, _COUNT_OF_1 = ({**each, "show_default": True} for each in (_COUNT, _COUNT_1))
_SIZE_OF: dict[str, Any] = {"type": SIZE, "metavar": "SIZE"}
_SAMPLES = (
    click.option("--data", metavar="FILE",
                 help="Data file or directory, in any format that legroom.open reads without dtype; one row is one "
                      "sample. For a raw binary file of token IDs, give --sample-bytes instead. A pattern in quotes, "
                      "'train-*.tar', stands for all of its matches."),
    click.option("--keys", metavar="NAME,…", help="Use only these arrays or columns of the file (with --data)."),
    click.option("--sample-bytes", **_SIZE_OF,
                 help="Size of one sample, for example 600KB (with --batch, instead of --data)."),
)  # fmt: skip
_KINDS: dict[str, Any] = {"type": click.Choice(["torch", "legroom"]), "default": "torch"}
LOADER_OF_PLAN = (
    click.option("--workers", **_COUNT_OF, default=0, help="num_workers of the DataLoader (with --batch)."),
    click.option("--prefetch", **_COUNT_OF_1, default=2,
                 help="prefetch_factor of the DataLoader (with --batch and at least 1 worker)."),
    click.option("--persistent-workers", is_flag=True,
                 help="The DataLoader uses persistent_workers (with --batch and at least 1 worker)."),
    click.option("--pin-memory", is_flag=True, help="The DataLoader uses pin_memory (with --batch)."),
    click.option("--loader", **_KINDS, show_default=True, help="Which DataLoader the script uses (with --batch)."),
)  # fmt: skip
# A DataLoader that --dataset names brings its own.
LOADER_OF_CHECK = (
    click.option("--workers", **_COUNT, default=0,
                 help="num_workers of the DataLoader. Default: that of the DataLoader that --dataset names, otherwise "
                      "0."),
    click.option("--prefetch", **_COUNT_1, default=2,
                 help="prefetch_factor of the DataLoader (with at least 1 worker). Default: that of the DataLoader "
                      "that --dataset names, otherwise 2."),
    click.option("--persistent-workers", is_flag=True,
                 help="The DataLoader uses persistent_workers (with at least 1 worker). Default: as in the DataLoader "
                      "that --dataset names, otherwise off."),
    click.option("--pin-memory", is_flag=True,
                 help="The DataLoader uses pin_memory. Default: as in the DataLoader that --dataset names, otherwise "
                      "off."),
    click.option("--loader", **_KINDS,
                 help="Which DataLoader the script uses. Default: the kind of the DataLoader that --dataset names, "
                      "otherwise torch."),
)  # fmt: skip
_JOB = (
    click.option("--val-workers", **_COUNT_OF,
                 help="num_workers of a validation DataLoader that exists at the same time (with --batch). Default: "
                      "no validation DataLoader."),
    click.option("--val-batch", **_COUNT_OF_1,
                 help="Batch size of the validation DataLoader (with --val-workers). Default: same as --batch."),
    click.option("--ranks", **_COUNT_OF_1, default=1, help="Ranks (training processes) per job on this machine."),
    click.option("--params", type=COUNT, default=0, metavar="N",
                 help="Number of model parameters that each rank keeps in host RAM (CPU training, offload), for "
                      "example 125M."),
    click.option("--optimizer", show_default=True, type=click.Choice(list(OPTIMIZERS)), default="none",
                 help="Optimizer whose state is kept in host RAM (with --params); momentum: SGD with momentum."),
    click.option("--dtype", show_default=True, type=click.Choice(list(DTYPES)), default="float32",
                 help="Data type of the parameters (with --params)."),
)  # fmt: skip


# Options of a job that have no effect without another, or without any of several.
WORKERS = ("workers", "val_workers")
TRAINING_NEEDS = {
    "keys": ("data",), "prefetch": WORKERS, "persistent_workers": WORKERS, "val_batch": ("val_workers",),
    "optimizer": ("params",), "dtype": ("params",),
}  # fmt: skip

_OF_WORKERS = {**TRAINING_NEEDS, "start_method": WORKERS}


def training_options(of_loader: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
    """Add the options that describe a job to a command, with its options of the DataLoader."""

    def with_options(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed((*_SAMPLES, *of_loader, *_JOB)):
            command = option(command)
        return command

    return with_options


def names(keys: str | None) -> list[str] | None:
    """Comma-separated names as a list."""
    return [name.strip() for name in keys.split(",") if name.strip()] if keys else None


def asked(given: dict[str, Any]) -> dict[str, Any]:
    """The options under the library's argument names."""
    renamed = {"workers": "num_workers", "prefetch": "prefetch_factor"}
    found = {renamed.get(name, name): value for name, value in given.items()}
    found["keys"] = names(found["keys"])
    return found


def typed() -> set[str]:
    """The parameter names of the options that the user typed."""
    context = click.get_current_context()
    return {name for name in _spelled(context) if context.get_parameter_source(name) is ParameterSource.COMMANDLINE}


def require_options(needs: Mapping[str, tuple[str, ...]]) -> None:
    """Refuse a typed option that has no effect without one of the others; all are parameter names."""
    given, spelled = typed(), _spelled(click.get_current_context())
    for name, others in needs.items():
        if name in given and given.isdisjoint(others):
            other = say(" or ").join(spelled[other] for other in others)
            raise click.UsageError(say("{option} needs {other}", option=spelled[name], other=other))


def require_workers(from_loader: bool = False) -> None:
    """Refuse settings of workers where none are typed; ``from_loader``: unless a DataLoader may have them."""
    context = click.get_current_context()
    given, spelled = typed(), _spelled(context)
    if from_loader and "workers" not in given:
        return
    if any(context.params.get(name) for name in WORKERS):
        return
    for name in (one for one, needed in _OF_WORKERS.items() if one in given and needed == WORKERS):
        raise click.UsageError(
            say("{option} needs {workers} 1 or more: torch refuses it without workers", option=spelled[name],
                workers=spelled["workers"])
        )  # fmt: skip


def refuse_beside(option: str, others: set[str]) -> None:
    """Refuse the others, which have no effect beside the option; all are parameter names."""
    given, spelled = typed(), _spelled(click.get_current_context())
    if option in given and given & others:
        refused = listed(text for name, text in spelled.items() if name in given & others)
        raise click.UsageError(say("{option} cannot be combined with {others}", option=spelled[option], others=refused))


def _spelled(context: click.Context) -> dict[str, str]:
    """The options as the help writes them, by parameter name."""
    return {str(one.name): one.opts[0] for one in context.command.params if isinstance(one, click.Option)}


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


def in_options(error: LegroomError, command: click.Command, name: str = "run") -> None:
    """Replace arguments in the error's sentences by options of the command, and `legroom run` by its name."""
    if isinstance(error, (CommandNotFound, CommandNotRunnable)):  # they quote the user's command
        error.fix = tuple(one.replace("\nlegroom run --", f"\nlegroom {name} --") for one in error.fix)
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
        if option is None or (option.is_flag and (value is not None or several is not None)):
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
    """That error with a command line that works, where an option of a command stands before the command.

    Of similar options, only those that the help shows are named.
    """
    ctx, option = problem.ctx, problem.option_name
    if ctx is not None and problem.possibilities:
        unseen = {word for one in ctx.command.params if isinstance(one, WithEarlierNames) for word in one.opts[1:]}
        problem = type(problem)(
            option, problem.message, [word for word in problem.possibilities if word not in unseen], ctx
        )
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
