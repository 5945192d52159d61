"""The language of the command line: --lang, help in it, and streams that can carry it.

Covers: what a person chooses on the command line and what the streams allow. Does not cover: what the environment
chooses, the catalogues (words).
"""

from __future__ import annotations

import codecs
import inspect
import os
import sys
from collections.abc import Sequence

import click

from legroom import words
from legroom.cli.language_ahead import asked_for
from legroom.columns import cells, fill
from legroom.errors import UsageError
from legroom.words import say

_HANDLER = "legroom.escape"
_HELP, _ASIDE = 76, 44  # columns for a paragraph of help, and for one beside an option's name
_english: dict[click.Command | click.Option, str] = {}  # help as it is written, whatever it was translated to


def _chosen(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    language = words.known(value)
    if language is None:
        raise UsageError(
            say("Legroom does not speak {name!r}", name=value),
            why=say("there are {names}", names=words.listed(words.LANGUAGES)),
            fix=(say("give one of them, or leave --lang out: LANG decides then"),),
        )
    os.environ[words.VARIABLE] = language  # processes that are started speak it too
    words.speak(language)
    settle(as_json=ctx.find_root().obj == "json")
    translate(ctx.command)
    _translate_help_option(ctx)


# Eager: errors about other options and their help are in the language that was asked for.
language_option = click.option(
    "--lang",
    metavar="LANGUAGE",
    is_eager=True,
    expose_value=False,
    callback=_chosen,
    help="Speak this language, zh or en; LANG decides otherwise.",
)


def listen(command: click.Command, arguments: Sequence[str], name: str, *, as_json: bool) -> None:
    """Speak what --lang asks for from the first word on: what is wrong with the line is said in it too."""
    name_asked, met = asked_for(command, arguments, name)
    language = words.known(name_asked or "")
    if language is not None:
        words.speak(language)
        settle(as_json=as_json)
    for context in met:
        _translate_help_option(context)


def _translate_help_option(context: click.Context) -> None:
    """click keeps the one it made, in the language of that moment."""
    option = context.command.get_help_option(context)
    if option is not None:
        option.help = say("Show this message and exit.")


def translate(command: click.Command) -> click.Command:
    """A verb with --lang, and its help in the language that is spoken."""
    if not any("--lang" in param.opts for param in command.params):
        language_option(command)
    options = [param for param in command.params if isinstance(param, click.Option)]
    shown: list[click.Command | click.Option] = [command, *options]
    for one in shown:
        text = say(_english.setdefault(one, inspect.cleandoc(one.help or "")))
        one.help = _wrapped(text, _HELP if one is command else _ASIDE)
    if isinstance(command, click.Group):
        for child in command.commands.values():
            translate(child)
    return command


def _wrapped(text: str, columns: int) -> str:
    """Paragraphs as click shall leave them, where click would count a Chinese character as one column."""
    if cells(text) == len(text):
        return text
    return "\n\n".join("\b\n" + fill(part, columns, "", "") for part in text.split("\n\n"))


def open_streams() -> None:
    """Streams that carry what they can and never fail: the rest is written as JSON writes it."""
    codecs.register_error(_HANDLER, _escaped)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_HANDLER)


def settle(*, as_json: bool) -> None:
    """The language that is chosen, or English where the screen cannot show it; JSON can escape anything."""
    if words.language() == words.ENGLISH:
        return
    if not as_json and not _carries(say("none")):
        words.speak(words.ENGLISH)
        return
    from legroom.cli.click_words import teach_click

    teach_click()


def _carries(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def _escaped(problem: UnicodeError) -> tuple[str, int]:
    """Characters an encoding does not have, as \\u escapes: JSON stays JSON, with no byte of a name lost."""
    assert isinstance(problem, UnicodeEncodeError)
    wrong = problem.object[problem.start : problem.end]
    units = wrong.encode("utf-16-be", "surrogatepass")
    escapes = [f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)]
    return "".join(escapes), problem.end
