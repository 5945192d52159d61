"""Argument types the verbs share. Covers: sizes, durations, keys of the cache. Does not cover: any verb."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
from click.shell_completion import CompletionItem

from legroom.errors import LegroomError, UsageError
from legroom.units import parse_duration, parse_size
from legroom.words import say


class Measure(click.ParamType[Any]):
    """An amount as people write it, read by a function of units."""

    def __init__(self, name: str, read: Callable[[str], Any]) -> None:
        self.name = name
        self._read = read

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        try:
            return self._read(value)
        except UsageError as problem:
            self.fail(say("{name}: {why}", name=problem.what, why=problem.fix[0]), param, ctx)


SIZE = Measure("size", parse_size)
DURATION = Measure("duration", parse_duration)


class EntryName(click.ParamType[str]):
    """A file, or a key of the cache; a shell that asks is given the keys and sources there are."""

    name = "file|key"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        return str(value)

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        from legroom.cache.catalog import entries

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
