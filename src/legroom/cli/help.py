"""`legroom help [COMMAND]`, and how --help and usage lines are wrapped: never inside an option name or a default.

click breaks lines at the hyphens of option names and counts a Chinese character as one column. It also imports shutil,
and with it three compressors, to ask for the terminal's width.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterable
from typing import TextIO

import click
from click.shell_completion import CompletionItem

from legroom.messages import cells, fill, say

_NOT_WRAPPED = "\b"  # click's mark, on the first line of a paragraph
_BRACKETS = re.compile(r"\s+(\[[^\[\]]*\])\Z")  # [default: 60s], [required] at the end of an option's help


class HelpFormatter(click.HelpFormatter):
    """As click's, with other line breaks and with the headings of the chosen language."""

    def __init__(self, indent_increment: int = 2, width: int | None = None, max_width: int | None = None) -> None:
        if width is None and getattr(click.formatting, "FORCED_WIDTH", None) is None:
            width = max(min(columns_of(sys.__stdout__) or 80, max_width or 80) - 2, 50)
        super().__init__(indent_increment, width, max_width)

    def write_usage(self, prog: str, args: str = "", prefix: str | None = None) -> None:
        """The usage line; what does not fit stands below its first argument."""
        if prefix is None:
            prefix = say("Usage:")
            prefix += " " if prefix.isascii() else ""  # a wide colon brings its own space
        start = " " * self.current_indent + f"{prefix}{prog}"
        self.write((fill(args, self.width, start + " ", " " * (cells(start) + 1)) if args else start) + "\n")

    def write_heading(self, heading: str) -> None:
        """A heading with the colon of its language."""
        self.write(" " * self.current_indent + say("{heading}:", heading=heading) + "\n")

    def write_text(self, text: str) -> None:
        """Paragraphs, indented."""
        self.write("\n\n".join(_wrapped(text, self.width, " " * self.current_indent)) + "\n")

    def write_dl(self, rows: Iterable[tuple[str, str]], col_max: int = 30, col_spacing: int = 2) -> None:
        """Names and their help in two columns; below a name that is longer than its column."""
        rows = list(rows)
        column = min(max(cells(name) for name, _ in rows), col_max) + col_spacing
        indent = " " * (self.current_indent + column)
        for name, about in rows:
            start = " " * self.current_indent + name
            lines = "\n\n".join(_wrapped(about, max(self.width, len(indent) + 10), indent)).splitlines()
            if lines and cells(name) <= column - col_spacing:
                lines[0] = start + " " * (len(indent) - cells(start)) + lines[0][len(indent) :]
            else:
                lines.insert(0, start)
            self.write("\n".join(lines) + "\n")


class HelpContext(click.Context):
    """A context whose help is written by HelpFormatter."""

    formatter_class = HelpFormatter


def _wrapped(text: str, columns: int, indent: str) -> list[str]:
    """Each paragraph wrapped; brackets at its end stay together, on a line of their own if need be."""
    wrapped = []
    for part in re.split(r"\n\s*\n", text.strip("\n")):
        lines = part.splitlines()
        if lines and lines[0].strip() == _NOT_WRAPPED:
            wrapped.append("\n".join(indent + line for line in lines[1:]))
            continue
        part = " ".join(line.strip() for line in lines)
        brackets = _BRACKETS.search(part)
        block = fill(part if brackets is None else part[: brackets.start()], columns, indent, indent)
        if brackets is not None:
            last = block.rpartition("\n")[2]
            fits = cells(last) + 2 + cells(brackets[1]) <= columns
            block += f"  {brackets[1]}" if fits else "\n" + fill(brackets[1], columns, indent, indent)
        wrapped.append(block)
    return wrapped


def columns_of(stream: TextIO | None) -> int | None:
    """The columns that the user sets, or of the terminal behind a stream; None where it has none."""
    given = os.environ.get("COLUMNS", "")
    if given.isdecimal() and int(given):
        return int(given)
    try:
        return os.get_terminal_size(stream.fileno()).columns or None  # type: ignore[union-attr]
    except (AttributeError, OSError, ValueError):  # no terminal
        return None


def _below(context: click.Context, words: list[str]) -> click.Context:
    """The context of the command that the arguments name; UsageError if there is none."""
    while words:
        group = context.command
        if not isinstance(group, click.Group):
            context.fail(say("Got unexpected extra argument ({args})", args=" ".join(words)))
        name, command, words = group.resolve_command(context, words)
        assert command is not None  # resolve_command refuses unknown names
        context = command.context_class(command, context, name, **command.context_settings)
    return context


def _complete(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Complete the next subcommand."""
    try:
        found = _below(ctx.find_root(), list(ctx.params.get("names") or ()))
    except click.UsageError:
        return []
    names = found.command.list_commands(found) if isinstance(found.command, click.Group) else []
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


@click.command("help")
@click.argument("names", nargs=-1, metavar="[COMMAND]", shell_complete=_complete)
@click.pass_context
def command(ctx: click.Context, names: tuple[str, ...]) -> None:
    """Show the help of a command."""
    found = _below(ctx.find_root(), list(names))
    click.echo(found.get_help(), color=ctx.color)
