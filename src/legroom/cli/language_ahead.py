"""The language a command line asks for, found before the line is checked.

Covers: --lang at the door, at a verb and below one, on lines that click will refuse. Does not cover: speaking it
(language.py), or refusing a language that is not known, which --lang itself does.

click stops at the first thing it does not like, and what it says of it is worded on the spot: a --lang further on would
come too late. So click's own parser goes over the words once beforehand. It alone knows where `legroom run` ends and
the command begins that is run, which may have a --lang of its own.
"""

from __future__ import annotations

from collections.abc import Sequence

import click

_OPTION = "--lang"


def asked_for(
    command: click.Command, arguments: Sequence[str], name: str
) -> tuple[str | None, list[click.Context]]:
    """What --lang is given, the innermost where there are several, and the commands met on the way to it."""
    language: str | None = None
    met: list[click.Context] = []
    rest = list(arguments)
    inner: click.Command | None = command
    while _given(list(arguments)) is not None:
        if inner is None:
            return _given(rest) or language, met  # no such verb
        context = click.Context(inner, met[-1] if met else None, name, **inner.context_settings)
        met.append(context)
        try:
            options, left, _ = inner.make_parser(context).parse_args(list(rest))
        except click.UsageError:
            # It will be refused, so nothing is run whose words these could be.
            return _given(rest) or language, met
        language = options.get("lang") or language
        if not isinstance(inner, click.Group) or not left:
            break
        name, rest = left[0], left[1:]
        inner = inner.get_command(context, name)
    return language, met


def _given(words: list[str]) -> str | None:
    """The last --lang before a bare ``--``, by its looks alone; "" where it has no value."""
    given = None
    for place, word in enumerate(words):
        if word == "--":
            break
        if word == _OPTION:
            given = words[place + 1] if place + 1 < len(words) else ""
        elif word.startswith(_OPTION + "="):
            given = word.partition("=")[2]
    return given
