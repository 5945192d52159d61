"""Argument types and options that several commands share: sizes, durations, cache entries, and a job's description.

Also refuses options that would have no effect beside others, or without them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from copy import copy
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem

from legroom.advice.job_settings_to_workload import DTYPES, OPTIMIZERS
from legroom.errors import LegroomError, UsageError
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


_COUNT_OF: dict[str, Any] = {"type": AT_LEAST_0, "metavar": "N", "show_default": True}
_COUNT_OF_1: dict[str, Any] = {**_COUNT_OF, "type": AT_LEAST_1}
_SIZE_OF: dict[str, Any] = {"type": SIZE, "metavar": "SIZE"}
_OPTIONS = (
    click.option("--data", metavar="FILE",
                 help="Data file or directory, in any format that legroom.open reads; one row is one sample. "
                      "A pattern in quotes, 'train-*.tar', stands for all of its matches."),
    click.option("--keys", metavar="NAME,…", help="Use only these arrays or columns of the file (with --data)."),
    click.option("--sample-bytes", **_SIZE_OF, help="Size of one sample, for example 600KB (instead of --data)."),
    click.option("--workers", **_COUNT_OF, default=0, help="num_workers of the DataLoader."),
    click.option("--prefetch", **_COUNT_OF_1, default=2, help="prefetch_factor of the DataLoader."),
    click.option("--persistent-workers", is_flag=True, help="The DataLoader uses persistent_workers."),
    click.option("--pin-memory", is_flag=True, help="The DataLoader uses pin_memory."),
    click.option("--loader", show_default=True, type=click.Choice(["torch", "legroom"]), default="torch",
                 help="Which DataLoader the script uses."),
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


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options that describe a job to a command."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


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
