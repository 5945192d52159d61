"""Standard streams of the command line: they survive being closed, a full disk and a closed pipe.

Control characters in names are escaped; only Legroom's own colours reach the terminal. A closed descriptor is replaced
by /dev/null opened the wrong way: otherwise the next file opened would get its number and receive the output.
"""

from __future__ import annotations

import codecs
import errno
import io
import os
import re
import sys
from typing import IO, Any, TextIO

import click

from legroom.errors import CannotWrite
from legroom.messages import CONTROL, harmless, say

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
_COLOURS = re.compile(r"(\x1b\[(?:0|1|3[0-7])m)")  # what layout.paint writes


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
