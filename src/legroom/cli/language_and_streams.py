"""The language of the command line (--lang, help, click's messages), its streams, and errors and remarks on stderr.

click formats an error when it finds one, so --lang is read before click parses the line, with click's own parser: only
that knows where `legroom run` ends and the supervised command begins. click translates its messages with gettext,
which knows neither --lang nor LEGROOM_LANG, so its lookup functions are replaced. A message that another version of
click words differently stays English.

The streams survive being closed, a full disk and a closed pipe. Control characters in names are escaped; only Legroom's
own colours reach the terminal. A closed descriptor is replaced by /dev/null opened the wrong way: otherwise the next
file opened would get its number and receive the output.

Errors and remarks are wrapped on a terminal alone, with commands and quotes whole.
"""

from __future__ import annotations

import ast
import codecs
import errno
import inspect
import io
import os
import re
import sys
from collections.abc import Callable, Sequence
from typing import IO, Any, TextIO

import click

from legroom import messages
from legroom.cli.help import HelpContext, columns_of
from legroom.errors import CannotWrite, LegroomError, UsageError
from legroom.messages import CONTROL, cells, fill, harmless, phrase, say, step_indent, step_label

_english: dict[click.Command | click.Option, str] = {}  # help in English, before translation


def _chosen(ctx: click.Context, param: click.Parameter, value: str | None) -> None:
    if value is None:
        return
    language = messages.known(value)
    if language is None:
        raise UsageError(
            say("language {name!r} is not supported", name=value),
            why=say("supported languages: {names}", names=messages.listed(messages.LANGUAGES)),
            fix=(say("pass one of them, or leave --lang out to use LANG"),),
        )
    os.environ[messages.VARIABLE] = language  # for child processes; this one speaks it since apply_language


# Eager: errors about other options and their help are in this language.
language_option = click.option(
    "--lang",
    metavar="LANGUAGE",
    is_eager=True,
    expose_value=False,
    callback=_chosen,
    help="Language of the output: zh or en; default: from LANG.",
)


def apply_language(command: click.Command, arguments: Sequence[str], name: str, *, as_json: bool) -> str | None:
    """Switch to the language of --lang before the line is parsed, so that usage errors are in it too.

    Returns why the output is in another language than that of --lang or LEGROOM_LANG; None if it is not. With
    LEGROOM_LANG, which is set once for all commands, only a name that is no language of ours is worth a line each time.
    """
    dropped = None
    name_asked, met = asked_for(command, arguments, name)
    language = messages.known(name_asked or "")
    if language is not None:
        messages.speak(language)
        fall_back_to_english(as_json=as_json)
        if messages.language() != language:
            encoding = getattr(sys.stdout, "encoding", None) or "ascii"
            dropped = say(
                "--lang {name} has no effect: the encoding of standard output, {encoding}, lacks its characters; set "
                "PYTHONIOENCODING=utf-8",
                name=language, encoding=encoding,
            )  # fmt: skip
    own = os.environ.get(messages.VARIABLE)
    if name_asked is None and own and messages.known(own) is None:
        dropped = say(
            "{variable}={name} has no effect: the supported languages are {names}",
            variable=messages.VARIABLE, name=own, names=messages.listed(messages.LANGUAGES),
        )  # fmt: skip
    for context in met:
        _translate_help_option(context)
    return dropped


def _translate_help_option(context: click.Context) -> None:
    """click caches its --help option in the language of that moment."""
    option = context.command.get_help_option(context)
    if option is not None:
        option.help = say("Show this message and exit.")


def translate(command: click.Command) -> click.Command:
    """Add --lang to a command, translate its help, and have it wrapped by our formatter."""
    command.context_class = HelpContext
    if not any("--lang" in param.opts for param in command.params):
        language_option(command)
    options = [param for param in command.params if isinstance(param, click.Option)]
    shown: list[click.Command | click.Option] = [command, *options]
    for one in shown:
        one.help = say(_english.setdefault(one, inspect.cleandoc(one.help or "")))
    if isinstance(command, click.Group):
        for child in command.commands.values():
            translate(child)
    return command


def fall_back_to_english(*, as_json: bool) -> None:
    """Keep the chosen language where standard output can encode it; JSON can escape anything."""
    if messages.language() != messages.ENGLISH and not as_json and not _encodable(say("none")):
        messages.speak(messages.ENGLISH)


def _encodable(text: str) -> bool:
    try:
        text.encode(getattr(sys.stdout, "encoding", None) or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


_OPTION = "--lang"


def asked_for(command: click.Command, arguments: Sequence[str], name: str) -> tuple[str | None, list[click.Context]]:
    """The value of --lang, the innermost where there are several, and the contexts of the commands before it."""
    language: str | None = None
    met: list[click.Context] = []
    rest = list(arguments)
    inner: click.Command | None = command
    while _given(list(arguments)) is not None:
        if inner is None:
            return _given(rest) or language, met  # no such command
        context = click.Context(inner, met[-1] if met else None, name, **inner.context_settings)
        met.append(context)
        try:
            options, left, _ = inner.make_parser(context).parse_args(list(rest))
        except click.UsageError:
            # click will refuse the line, so no supervised command follows.
            return _given(rest) or language, met
        language = options.get("lang") or language
        if not isinstance(inner, click.Group) or not left:
            break
        name, rest = left[0], left[1:]
        inner = inner.get_command(context, name)
    return language, met


def _given(messages: list[str]) -> str | None:
    """The last --lang before a bare ``--``, without parsing; "" where it has no value."""
    given = None
    for place, word in enumerate(messages):
        if word == "--":
            break
        if word == _OPTION:
            given = messages[place + 1] if place + 1 < len(messages) else ""
        elif word.startswith(_OPTION + "="):
            given = word.partition("=")[2]
    return given


_EXTRA = (phrase("Got unexpected extra argument ({args})"), phrase("Got unexpected extra arguments ({args})"))
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
    *_EXTRA,
    phrase("Option {name!r} requires an argument."),
    phrase("Option {name!r} requires {nargs} arguments."),
    phrase("Option {name!r} does not take a value."),
    phrase("Choose from:\n\t{choices}"),
    phrase("{value!r} is not {choice}."),
    phrase("{value!r} is not one of {choices}."),
    phrase("{value!r} is not a valid {number_type}."),
    phrase("{value} is not in the range {range}."),
)


def translate_click() -> None:
    """Let click find its messages in our catalogue."""
    for name in ("core", "decorators", "exceptions", "formatting", "parser", "types"):
        module = sys.modules.get(f"click.{name}")
        if hasattr(module, "_"):
            setattr(module, "_", say)  # noqa: B010 - no attribute that types know of
        if hasattr(module, "ngettext"):
            setattr(module, "ngettext", _one_or_many)  # noqa: B010


def extra_arguments(ctx: click.Context, words: Sequence[str]) -> click.UsageError:
    """click's error for arguments that a command does not take."""
    return click.UsageError(_one_or_many(*_EXTRA, len(words)).format(args=" ".join(words)), ctx)


def explain_extra_arguments(problem: click.ClickException) -> click.ClickException:
    """That error with what to do, where one file was given and the shell has made several of a pattern."""
    ctx = problem.ctx if isinstance(problem, click.UsageError) else None
    if ctx is None or not problem.message.startswith(tuple(say(one).partition("{")[0] for one in _EXTRA)):
        return problem
    if not any("FILE" in (param.metavar or "") and ctx.params.get(str(param.name)) for param in ctx.command.params):
        return problem
    return click.UsageError(
        say(
            "{message}. Give one file: the shell turns a pattern such as *.log into every file that matches.",
            message=problem.message,
        ),
        ctx,
    )


def integer_refused(problem: click.ClickException) -> UsageError | None:
    """click's error for an integer option, as the library refuses the same argument."""
    param = problem.param if isinstance(problem, click.BadParameter) else None
    typed = _TYPED.match(problem.message)
    if param is None or not isinstance(param.type, click.IntRange) or param.type.min is None or typed is None:
        return None
    from legroom.system.argument_checks import check_integer

    try:
        check_integer(str(param.name), ast.literal_eval(typed[0]), int(param.type.min))
    except UsageError as refused:
        return refused
    return None


_TYPED = re.compile(r"'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\"|-?\d+")  # at the start of click's messages


def _one_or_many(one: str, many: str, count: int) -> str:
    return say(one if count == 1 else many)


_HANDLER = "legroom.escape"


def escape_unencodable() -> None:
    """Write characters that a stream's encoding lacks as JSON escapes."""
    codecs.register_error(_HANDLER, _escaped)
    for stream in (sys.stdout, sys.stderr):
        reconfigure = getattr(stream, "reconfigure", None)
        if reconfigure is not None:
            reconfigure(errors=_HANDLER)


def _escaped(problem: UnicodeError) -> tuple[str, int]:
    """Characters an encoding does not have, as \\u escapes: JSON stays JSON, with no byte of a name lost."""
    assert isinstance(problem, UnicodeEncodeError)
    wrong = problem.object[problem.start : problem.end]
    units = wrong.encode("utf-16-be", "surrogatepass")
    escapes = [f"\\u{units[at]:02x}{units[at + 1]:02x}" for at in range(0, len(units), 2)]
    return "".join(escapes), problem.end


# In the order of their numbers, since open() returns the lowest free one. stdin and stdout are opened the wrong way, so
# that using them fails; output to stderr is dropped.
_STANDARD = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))
_COLOURS = re.compile(r"(\x1b\[(?:0|1|3[0-7])m)")  # what text_layout.paint writes


class NotWritten(Exception):
    """Writing to standard output failed. Not an OSError: click exits by itself on one from a pipe."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class EscapingStream(io.TextIOWrapper):
    """A stream that escapes control characters in the names of files and processes."""

    def write(self, text: str, /) -> int:
        """Write with control characters escaped as in JSON."""
        self.draw(_guarded(text))
        return len(text)

    def draw(self, text: str) -> int:
        """Write including escape sequences."""
        return super().write(text)


class UnescapedStream:
    """A guarded stream for rich, which needs escape sequences."""

    def __init__(self, stream: EscapingStream) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """Write unchanged."""
        return self._stream.draw(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class StandardOutput(EscapingStream):
    """Standard output: a failed write raises NotWritten."""

    def draw(self, text: str) -> int:
        """As usual, or NotWritten."""
        try:
            return super().draw(text)
        except OSError as problem:
            raise NotWritten(problem) from problem

    def flush(self) -> None:
        """As usual, or NotWritten."""
        try:
            super().flush()
        except OSError as problem:
            raise NotWritten(problem) from problem


class StandardError(EscapingStream):
    """Standard error: a failed write is dropped, since no stream is left to report it on."""

    def draw(self, text: str) -> int:
        """As usual, or drop it."""
        try:
            return super().draw(text)
        except OSError:
            discard(self)
            return len(text)

    def flush(self) -> None:
        """As usual, or drop it."""
        try:
            super().flush()
        except OSError:
            discard(self)


def for_drawing(stream: TextIO) -> Any:
    """The stream for rich."""
    return UnescapedStream(stream) if isinstance(stream, EscapingStream) else stream


def _guarded(text: str) -> str:
    if CONTROL.search(text) is None:
        return text
    parts = _COLOURS.split(text)  # odd parts are colours
    return "".join(part if odd % 2 else harmless(part) for odd, part in enumerate(parts))


def guard_streams() -> None:
    """Replace closed streams, and guard stdout and stderr."""
    for name, mode, direction in _STANDARD:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, direction)
            os.set_inheritable(number, True)
            stream = os.fdopen(number, mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # keeps it open
    sys.stdout = _of(StandardOutput, sys.stdout)
    sys.stderr = _of(StandardError, sys.stderr)


def _of(kind: type[io.TextIOWrapper], stream: TextIO) -> TextIO:
    """The same stream as that class; Python keeps the old one in ``sys.__stdout__``."""
    if not isinstance(stream, io.TextIOWrapper):
        return stream
    return kind(
        stream.buffer,
        encoding=stream.encoding,
        errors=stream.errors,
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def write_line(text: str) -> None:
    """Write a line directly to standard output, or NotWritten; for a thread that may block there forever.

    It holds neither the stream's lock nor its buffer, so the process can flush and exit without it.
    """
    try:
        number = sys.stdout.fileno()
    except io.UnsupportedOperation:  # a stream in memory never blocks
        sys.stdout.write(text + "\n")
        return
    rest = memoryview((text + "\n").encode(sys.stdout.encoding, "backslashreplace"))
    try:
        while rest:
            rest = rest[os.write(number, rest) :]
    except OSError as problem:
        raise NotWritten(problem) from problem


def status_after(problem: OSError) -> int:
    """The exit status where standard output failed: 0 if its reader has gone, as `head` does; else it is an error."""
    discard(sys.stdout)
    if isinstance(problem, BrokenPipeError):
        return 0
    refused = _not_written(problem)
    click.echo(f"legroom: {refused}", err=True)
    return refused.exit_status


def _not_written(problem: OSError) -> CannotWrite:
    why = say("it is closed") if problem.errno == errno.EBADF else problem.strerror or str(problem)
    return CannotWrite(
        say("cannot write to standard output"), why=why, fix=(say("redirect it to a file with enough space: > FILE"),)
    )


def discard(stream: IO[str]) -> None:
    """Drop what cannot be written: Python would try again at exit and complain."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)


def line_width(columns: int | None) -> int:
    """The columns to write in, of so many: at most 100; 80 where they are unknown."""
    return max(40, min(100, columns or 80))


def message_printer(quiet: bool) -> Callable[[str], None]:
    """Prints a message beside the output of a supervised command, on stderr; prints nothing if quiet."""
    return lambda text: None if quiet else click.echo(remark_text(text), err=True)


def error_columns() -> int | None:
    """The columns for errors, as ``width``; None if stderr is not a terminal, where a search should find sentences."""
    return line_width(columns_of(sys.stderr)) if sys.stderr.isatty() else None


def error_text(error: LegroomError, columns: int | None) -> str:
    """The error for stderr, wrapped to the columns; None: as it is.

    Commands and code stand below a sentence, on lines of their own, and are not broken; nor are quotes in a sentence.
    """
    if columns is None:
        return f"legroom: {error}"
    blocks = _hanging("legroom: ", f"{error.what} [{error.code}]", columns, "  ")
    if error.why:
        blocks += _hanging(say("  why: "), error.why, columns, step_indent())
    for step in error.fix:
        blocks += _hanging(step_label(step), step, columns, step_indent())
    return "\n".join(blocks)


def remark_text(text: str) -> str:
    """A remark for stderr, wrapped where that is a terminal, which would break lines inside of quotes.

    Its first line may be indented. The lines below it are commands, which stay as they are.
    """
    columns = error_columns()
    if columns is None:
        return f"legroom: {text}"
    first, *rest = text.splitlines() or [""]
    indent = first[: len(first) - len(first.lstrip(" "))]
    return "\n".join([*_hanging(f"legroom: {indent}", first.lstrip(" "), columns, f"  {indent}"), *rest])


def usage_text(message: str, columns: int) -> str:
    """A message that click prints behind ``Error: ``, wrapped to the columns."""
    label = say("Error: {message}", message="")
    return "\n".join(_hanging(label, message, columns, "  "))[len(label) :]


_QUOTED = re.compile(r"(?<!\w)(?:`[^`]*`|'[^']*'|\"[^\"]*\")(?!\w)")  # a shorter one than a line stays together
_NO_BREAK = "\ue000"  # stands for a space at which no line may end


def _hanging(label: str, text: str, columns: int, indent: str) -> list[str]:
    """Text behind its label: the sentence is wrapped, the lines below it are not."""
    first, *rest = text.splitlines() or [""]
    if first.startswith('File "'):  # of a traceback
        wrapped = label + first
    else:
        fits = columns - cells(indent)
        whole = _QUOTED.sub(
            lambda found: (
                found[0].replace(" ", _NO_BREAK) if found[0][0] == "`" or cells(found[0]) <= fits else found[0]
            ),
            first,
        )
        wrapped = fill(whole, columns, label, indent).replace(_NO_BREAK, " ")
    return [wrapped, *(indent + line for line in rest)]
