"""What click itself says of a command line, in our language.

Covers: the sentences of click that people meet here. Does not cover: our own (words.say where they are said).

click looks its sentences up by gettext's reading of the environment, which knows neither --lang nor LEGROOM_LANG and
has no catalogue of click's. So the names it looks them up by are given ours; a sentence that another version of click
words otherwise stays English.
"""

from __future__ import annotations

import sys

from legroom.words import phrase, say

SENTENCES = (
    phrase("Usage:"),
    phrase("Options"),
    phrase("Commands"),
    phrase("Positional arguments"),
    phrase("Show the version and exit."),
    phrase("Show this message and exit."),
    phrase("default: {default}"),
    phrase("required"),
    phrase("Error: {message}"),
    phrase("Try '{command} {option}' for help."),
    phrase("Missing command."),
    phrase("Missing argument"),
    phrase("Missing option"),
    phrase("Missing parameter"),
    phrase("Invalid value: {message}"),
    phrase("Invalid value for {param_hint}: {message}"),
    phrase("No such option {name!r}."),
    phrase("No such option: {name}"),
    phrase("No such command {name!r}."),
    phrase("Did you mean {possibility}?"),
    phrase("(Did you mean one of: {possibilities}?)"),
    phrase("(Possible options: {possibilities})"),
    phrase("Got unexpected extra argument ({args})"),
    phrase("Got unexpected extra arguments ({args})"),
    phrase("Option {name!r} requires an argument."),
    phrase("Option {name!r} requires {nargs} arguments."),
    phrase("Option {name!r} does not take a value."),
    phrase("Choose from:\n\t{choices}"),
    phrase("{value!r} is not {choice}."),
    phrase("{value!r} is not one of {choices}."),
    phrase("{value!r} is not a valid {number_type}."),
    phrase("{value} is not in the range {range}."),
)


def teach_click() -> None:
    """Let click find its sentences in our catalogue."""
    for name in ("core", "decorators", "exceptions", "formatting", "parser", "types"):
        module = sys.modules.get(f"click.{name}")
        if hasattr(module, "_"):
            setattr(module, "_", say)  # noqa: B010 - no attribute that types know of
        if hasattr(module, "ngettext"):
            setattr(module, "ngettext", _one_or_many)  # noqa: B010


def _one_or_many(one: str, many: str, count: int) -> str:
    return say(one if count == 1 else many)
