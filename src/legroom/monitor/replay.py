"""A finished watch read back from its log.

Covers: samples from a file, however long, one at a time; lines that a kill cut short are left out and counted.
Does not cover: judging them again (stream.py does, as it would have live).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator

from legroom.errors import DamagedSource, UnreadableSource
from legroom.model import Sample
from legroom.monitor.record import SCHEMA, NotARecord, sample_of
from legroom.words import say

_LONGEST = 32 << 20  # bytes of a line: a thousand processes take 300 kB


def samples_in(path: str | os.PathLike[str], tell: Callable[[str], object]) -> Iterator[Sample]:
    """The samples of a log; what had to be left out is told at the end. A file that is no log is an error."""
    name = os.fspath(path)
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as problem:
        raise UnreadableSource(
            say("cannot read the log {path}", path=name),
            why=problem.strerror or str(problem),
            fix=(say("give a file that legroom watch --log wrote"),),
        ) from problem
    left_out, cut, found = 0, False, 0
    trouble = say("it is empty")
    with file:
        while raw := _line(file.readline):
            try:
                sample = sample_of(json.loads(raw))
            except (ValueError, RecursionError) as problem:
                if not raw.strip():
                    continue
                cut = not raw.endswith(b"\n")  # only the last line has no end
                left_out += 1
                if found == 0 and left_out == 1:
                    trouble = say("line 1: {problem}", problem=_words(problem))
                if found == 0 and not cut and left_out > 1:
                    break  # two lines and neither is ours: it is something else
                continue
            found += 1
            yield sample
    if not found:
        raise DamagedSource(
            say("{path} is not the log of a watch", path=name),
            why=trouble,
            fix=(say("give a file that legroom watch --log wrote: lines of {schema}", schema=SCHEMA),),
        )
    if cut:
        left_out -= 1
        tell(say("the last line of {path} was cut short and is left out", path=name))
    if left_out:
        tell(say("{count} line(s) of {path} could not be read and are left out", count=left_out, path=name))


def _line(readline: Callable[[int], bytes]) -> bytes:
    """The next line; of one that is too long only its beginning, the rest is passed over."""
    line = readline(_LONGEST)
    rest = line
    while rest and not rest.endswith(b"\n") and len(rest) == _LONGEST:
        rest = readline(_LONGEST)
        line = line[:1024] + b"\n"
    return line


def _words(problem: Exception) -> str:
    return str(problem) if isinstance(problem, NotARecord) else say("not JSON")
