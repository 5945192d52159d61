"""Read the end of a log file or a pipe in bounded memory; name what is compressed, binary or source code.

The cause of a failure is usually at the end of the log, so the end is read first. If it contains no failure (ranks that
print long after the first one failed), more is read, up to a limit; the bytes skipped are counted.
"""

from __future__ import annotations

import os
import stat
from contextlib import nullcontext
from dataclasses import replace
from typing import BinaryIO

from legroom.errors import UnreadableSource
from legroom.messages import say
from legroom.records.failure import LogFacts
from legroom.rescue.find_failures_in_log import KEEP, LogTail, facts_of
from legroom.system.open_file_or_pipe import open_to_its_end, refuse_device

MOST = 16 << 20  # bytes read if the last KEEP contain no failure
_CHUNK = 1 << 20


def read_log(path: str, standard_input: BinaryIO | None = None) -> LogFacts:
    """Read the end of that file; ``-`` is standard input."""
    try:
        if path == "-":
            if standard_input is None:
                refuse_device(os.fstat(0))
            with os.fdopen(os.dup(0), "rb") if standard_input is None else nullcontext(standard_input) as pipe:
                return _to_its_end(pipe)
        file, begin = open_to_its_end(path)
        with file:
            status = os.fstat(file.fileno())
            sized = stat.S_ISREG(status.st_mode) and status.st_size
            facts = _of_file(file, status.st_size) if sized else _to_its_end(file, begin)
            return replace(facts, not_a_log=facts.not_a_log or _source_code(path))
    except (OSError, ValueError) as problem:
        why = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
        raise UnreadableSource(
            say("cannot read the log {path}", path=path),
            why=why,
            fix=(say("give a readable file, or - to read from a pipe:\ndmesg | legroom explain -"),),
        ) from problem


_PACKED = {b"\x1f\x8b": "zcat", b"\x28\xb5\x2f\xfd": "zstdcat", b"\xfd7zXZ": "xzcat", b"BZh": "bzcat"}
_SOURCES = frozenset({".py", ".pyi", ".ipynb", ".sh", ".c", ".cc", ".cpp", ".cu", ".h"})
_SAMPLED = 8 << 10
_CONTROL = bytes({*range(32)} - {*b"\a\b\t\n\v\f\r\x1b"} | {127})
_MOST_CONTROL = 0.05  # of a text: a log may contain a few, and zeros where it was truncated while open


def _source_code(path: str) -> str | None:
    if os.path.splitext(path)[1] not in _SOURCES:
        return None
    return say("{name} is source code: pass the file with the output of the job", name=os.path.basename(path))


def _binary(data: bytes) -> str | None:
    """Why these bytes are not text; UTF-16 is text."""
    if data[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return None
    program = next((name for magic, name in _PACKED.items() if data.startswith(magic)), None)
    if program is not None:
        return say("the file is compressed: {program} FILE | legroom explain -", program=program)
    sample = data[:_SAMPLED].lstrip(b"\0") + data[_SAMPLED:][-_SAMPLED:].lstrip(b"\0")
    if len(sample) - len(sample.translate(None, _CONTROL)) > _MOST_CONTROL * len(sample):
        return say("the file is binary, not text: pass the file with the output of the job")
    return None


def _of_file(file: BinaryIO, size: int) -> LogFacts:
    binary = _binary(file.read(_SAMPLED))
    for length in (KEEP, MOST):
        file.seek(max(0, size - length))
        facts = facts_of(file.read(length), max(0, size - length))
        if facts.signs or facts.errors or length >= size:
            break
    return replace(facts, not_a_log=binary)


def _to_its_end(stream: BinaryIO, begin: bytes = b"") -> LogFacts:
    tail = LogTail(MOST)
    tail.feed(begin)
    while data := stream.read(_CHUNK):
        tail.feed(data)
    held = tail.bytes()
    skipped = tail.passed
    facts = facts_of(held[-KEEP:], skipped + max(0, len(held) - KEEP))
    if not (facts.signs or facts.errors or len(held) <= KEEP):
        facts = facts_of(held, skipped)
    return replace(facts, not_a_log=_binary(held))
