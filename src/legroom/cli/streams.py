"""The standard streams, whatever they were started with: closed, on a full disk, or a pipe nobody reads.

Covers: something in the place of a stream that is closed, telling a failed write to one from any other failure, and
leaving quietly; nothing a terminal would obey gets through but Legroom's own colours. Does not cover: their encoding
(language.py).

A closed descriptor is not left free: the next file that is opened would get its number, and whatever is printed would
land in that file. What stands in for it fails as a closed one does.
"""

from __future__ import annotations

import errno
import io
import os
import re
import sys
from typing import IO, Any, TextIO

from legroom.errors import CannotWrite
from legroom.words import CONTROL, harmless, say

# In the order of their numbers: the lowest free one is what the system gives. The direction of the first two is the
# wrong one, so that using them fails; what goes to standard error is lost without a further word.
_STANDARD = (("stdin", "r", os.O_WRONLY), ("stdout", "w", os.O_RDONLY), ("stderr", "w", os.O_WRONLY))
_COLOURS = re.compile(r"(\x1b\[(?:0|1|3[0-7])m)")  # what layout.paint writes


class NotWritten(Exception):
    """Standard output took nothing. No OSError: click ends a program by itself where it meets one of a pipe."""

    def __init__(self, problem: OSError) -> None:
        super().__init__(str(problem))
        self.problem = problem


class Guarded(io.TextIOWrapper):
    """A stream on which names in files and of processes do nothing but show."""

    def write(self, text: str, /) -> int:
        """As any stream; control characters as JSON escapes them."""
        self.draw(_guarded(text))
        return len(text)

    def draw(self, text: str) -> int:
        """Write what moves the cursor too."""
        return super().write(text)


class Drawing:
    """A guarded stream for what draws on the screen by itself: rich."""

    def __init__(self, stream: Guarded) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As it is."""
        return self._stream.draw(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


class Answers(Guarded):
    """Standard output, whose failures cannot be taken for any other's."""

    def draw(self, text: str) -> int:
        """As any stream, or NotWritten."""
        try:
            return super().draw(text)
        except OSError as problem:
            raise NotWritten(problem) from problem

    def flush(self) -> None:
        """As any stream, or NotWritten."""
        try:
            super().flush()
        except OSError as problem:
            raise NotWritten(problem) from problem


class Asides(Guarded):
    """Standard error that never fails: there would be nobody to tell, and the answer is elsewhere."""

    def draw(self, text: str) -> int:
        """As any stream, or nowhere."""
        try:
            return super().draw(text)
        except OSError:
            leave(self)
            return len(text)

    def flush(self) -> None:
        """As any stream, or nowhere."""
        try:
            super().flush()
        except OSError:
            leave(self)


def for_drawing(stream: TextIO) -> Any:
    """The stream as rich may have it."""
    return Drawing(stream) if isinstance(stream, Guarded) else stream


def _guarded(text: str) -> str:
    if CONTROL.search(text) is None:
        return text
    parts = _COLOURS.split(text)  # every second one is a colour
    return "".join(part if odd % 2 else harmless(part) for odd, part in enumerate(parts))


def hold() -> None:
    """Open the standard streams that are closed, and note failed writes to the two output streams."""
    for name, mode, direction in _STANDARD:
        if getattr(sys, name) is None:
            number = os.open(os.devnull, direction)
            os.set_inheritable(number, True)
            stream = os.fdopen(number, mode, encoding="utf-8")
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)  # kept, so that it stays open
    sys.stdout = _of(Answers, sys.stdout)
    sys.stderr = _of(Asides, sys.stderr)


def _of(kind: type[io.TextIOWrapper], stream: TextIO) -> TextIO:
    """The same stream as that kind; the old one stays where Python keeps it (``sys.__stdout__``)."""
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
    """A line straight to standard output, or NotWritten; for a thread that may block there for ever.

    It holds neither the stream's lock nor its buffer meanwhile: the process can flush and end without it.
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


def not_written(problem: OSError) -> CannotWrite:
    """What there is to say where an answer was not written."""
    why = say("it is closed") if problem.errno == errno.EBADF else problem.strerror or str(problem)
    return CannotWrite(
        say("the answer cannot be written to standard output"),
        why=why,
        fix=(say("send it where there is room for it: > FILE"),),
    )


def leave(stream: IO[str]) -> None:
    """Drop what cannot be written: Python would try again at exit and print an error."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
