"""The end of a log, read in bounded memory.

Covers: a file, a pipe or the bytes a supervisor kept; which lines are signs, which exception ended the program and
how far back the tracebacks that belong to it reach. Does not cover: what follows from the signs (classify.py).

What kills a program stands at the end of its log. So the end is read and the rest is not, however long it is; what
was passed over is counted.
"""

from __future__ import annotations

import os
import re
from collections import deque
from contextlib import nullcontext
from pathlib import Path
from typing import BinaryIO

from legroom.errors import UnreadableSource
from legroom.model.death import LogFacts, Sign
from legroom.rescue.signatures import code_of
from legroom.words import say

KEEP = 4 << 20  # bytes of a log's end: 64 ranks that each print a long traceback fit
LONGEST = 400  # characters of a line that are looked at and shown; progress bars run to megabytes
_CHUNK = 1 << 20
_MOST_SIGNS = 200

_PREFIX = r"(?:\[[\w.:/ -]+\]:? ?|(?:[EWI]\d{4} [\d:.]+ .*?\] ))*"
_TRACEBACK = re.compile(
    rf"^{_PREFIX}\s*(?:[+| ]*)?(?:Exception Group |Original )?Traceback \(most recent call last\)"
)
_KIND = r"(?:Error|Exception|Interrupt|Exit|Expired|Warning|Died|OutOfMemory\w*)"
_ERROR = re.compile(rf"^{_PREFIX}((?:[A-Za-z_]\w*\.)*[A-Z]\w*{_KIND}|[\w.]+\.[A-Z]\w+)(?::|$)")
# What Python could not raise, mostly while it was ending already: the traceback below it ended nothing.
_IGNORED = re.compile(rf"^{_PREFIX}\s*Exception ignored in")
_LINK = re.compile(r"During handling of the above exception|The above exception was the direct cause")


class Tail:
    """The last bytes of a stream."""

    def __init__(self, keep: int = KEEP) -> None:
        self._keep = keep
        self._chunks: deque[bytes] = deque()
        self._held = 0
        self.passed = 0  # bytes that are not held any more

    def feed(self, data: bytes) -> None:
        """Take what comes next."""
        self._chunks.append(data)
        self._held += len(data)
        while self._held - len(self._chunks[0]) >= self._keep:
            old = self._chunks.popleft()
            self._held -= len(old)
            self.passed += len(old)

    def bytes(self) -> bytes:
        """What is held."""
        return b"".join(self._chunks)


def read_log(path: str, standard_input: BinaryIO | None = None) -> LogFacts:
    """What the end of that file says; ``-`` is the standard input."""
    try:
        if path == "-":
            with (
                os.fdopen(os.dup(0), "rb") if standard_input is None else nullcontext(standard_input) as pipe
            ):
                return _to_its_end(pipe)
        with Path(path).open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.seekable() and size:
                file.seek(max(0, size - KEEP))
                return facts_of(file.read(KEEP), max(0, size - KEEP))
            return _to_its_end(file)  # a FIFO, or a file of /proc that gives no size
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UnreadableSource(
            say("cannot read the log {path}", path=path),
            why=why,
            fix=(say("give a file that you may read, or - to read from a pipe:\ndmesg | legroom explain -"),),
        ) from problem


def _to_its_end(stream: BinaryIO) -> LogFacts:
    tail = Tail()
    while data := stream.read(_CHUNK):
        tail.feed(data)
    return facts_of(tail.bytes(), tail.passed)


def facts_of(data: bytes, skipped: int = 0) -> LogFacts:
    """What these bytes, the end of a log, say."""
    lines = _lines(data, skipped)
    count = len(lines)
    signs: list[Sign] = []
    last_error: Sign | None = None
    error_at = None
    in_traceback = ignored = False
    for at, line in enumerate(lines):
        code = code_of(line)
        if code is not None:
            signs.append(Sign(code, line.strip(), count - at))
        if _IGNORED.match(line):
            ignored = True
        elif _TRACEBACK.match(line):
            in_traceback, ignored = not ignored, False
        elif in_traceback and (match := _ERROR.match(line)) and not line[:1].isspace():
            last_error, error_at = Sign(code or match[1], line.strip(), count - at), at
            in_traceback = False
    chain = None if error_at is None else _chain_start(lines, error_at)
    return LogFacts(
        signs=tuple(signs[-_MOST_SIGNS:]),
        last_error=last_error,
        chain_from=None if chain is None else count - chain,
        lines=count,
        skipped=skipped,
    )


def _lines(data: bytes, skipped: int) -> list[str]:
    # A progress bar rewrites its line with carriage returns: each state is a line here.
    parts = re.split(rb"[\r\n]+", data)
    if skipped and len(parts) > 1:
        parts = parts[1:]  # the first is half a line
    return [part[:LONGEST].decode("utf-8", "replace") for part in parts if part]


def _chain_start(lines: list[str], error_at: int) -> int:
    """Where the first of the tracebacks begins that end in the error at that line.

    Tracebacks belong together when a linking sentence says so, or when nothing ordinary was written between them.
    """
    start, inside, linked = error_at, True, False
    for at in range(error_at - 1, -1, -1):
        line = lines[at]
        if _TRACEBACK.match(line):
            start, inside, linked = at, False, False
        elif inside:
            continue
        elif _LINK.search(line):
            linked = True  # what stands above may be the end of a message of several lines
        elif _ERROR.match(line):
            inside = True
        elif code_of(line) is not None:
            start = at  # a worker's own last words, right above
        elif not (linked or line.startswith("[rank")):
            break
    return start
