"""Options that describe a training, for the verbs that ask about one. Covers: parsing. Does not cover: any verb."""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import click

from legroom.budget.demand import DTYPES, OPTIMIZERS
from legroom.cli.params import SIZE
from legroom.words import say

_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", re.I | re.A)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}


class Count(click.ParamType[int]):
    """A number of parameters as people write it: 125M, 1.5B. Decimal, unlike sizes."""

    name = "count"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        if isinstance(value, int):
            return value
        match = _COUNT.fullmatch(str(value))
        if match is None:
            self.fail(
                say(
                    "cannot read {value!r} as a number of parameters: write it like 125M or 1.5B", value=value
                ),
                param,
                ctx,
            )
        number, unit = match.groups()
        return int(Fraction(number) * 10 ** _POWERS[unit.lower()])


COUNT = Count()

_OPTIONS = (
    click.option("--data", metavar="FILE", help="A data file: batches by its rows."),
    click.option("--keys", metavar="NAME,…", help="Only these arrays of it."),
    click.option("--sample-bytes", type=SIZE, metavar="SIZE", help="Bytes of one sample."),
    click.option("--workers", type=int, default=0, show_default=True, help="num_workers of the loader."),
    click.option("--prefetch", type=int, default=2, show_default=True, help="prefetch_factor of the loader."),
    click.option("--persistent-workers", is_flag=True, help="Its workers live on from epoch to epoch."),
    click.option("--pin-memory", is_flag=True, help="The loader pins its batches."),
    click.option(
        "--loader", type=click.Choice(["torch", "legroom"]), default="torch", show_default=True,
        help="Whose DataLoader.",
    ),
    click.option("--val-workers", type=int, metavar="N", help="A validation loader, alive beside it."),
    click.option("--val-batch", type=int, metavar="N", help="Its batch, where it is another."),
    click.option("--ranks", type=int, default=1, show_default=True, help="Processes of one job on this box."),
    click.option("--per-process", type=SIZE, metavar="SIZE", help="What one process takes of /dev/shm besides."),
    click.option("--process-ram", type=SIZE, metavar="SIZE", help="Private memory of one process."),
    click.option("--params", type=COUNT, default=0, metavar="N", help="Parameters kept on the host, as 125M."),
    click.option(
        "--optimizer", type=click.Choice(list(OPTIMIZERS)), default="none", show_default=True,
        help="Its state, kept there too.",
    ),
    click.option("--dtype", type=click.Choice(list(DTYPES)), default="float32", show_default=True),
)  # fmt: skip


def training_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options of a training, on a verb."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def names(keys: str | None) -> list[str] | None:
    """Comma-separated names as a list."""
    return [name.strip() for name in keys.split(",") if name.strip()] if keys else None


def asked(given: dict[str, Any]) -> dict[str, Any]:
    """Those options as the library's functions call them."""
    renamed = {"workers": "num_workers", "prefetch": "prefetch_factor"}
    found = {renamed.get(name, name): value for name, value in given.items()}
    found["keys"] = names(found["keys"])
    return found
