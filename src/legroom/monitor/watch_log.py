"""The log of a watch: one JSON object (``legroom.watch/1``) per line, written, appended and read back.

Fields have the names of the records in records.watch_sample, plus ``alarms``. Readers ignore unknown fields and use
the default of a missing one. A kill at any time costs at most the line being written.

What the cache and the groups hold seldom changes and takes most of a line. The log leaves such a list out while it is
the same, and ``unchanged_since`` has the clock of the line with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.messages import counted, phrase, say
from legroom.records.watch_sample import Moment, Sample
from legroom.system.json_records import InvalidRecord, fields_of, from_json
from legroom.system.open_named_file import open_to_its_end

SCHEMA = "legroom.watch/1"

_LONGEST_LINE = 32 << 20  # bytes; a thousand processes take 300 kB
REPEATED = ("entries", "groups", "gpu_copies")  # left out of a line where they are as in an earlier one
_WRITTEN_AGAIN = 60  # lines after which they are written all the same: the beginning of a log may be removed
_STARTED = 5  # intervals after which a watch has more than started
_KEPT = 64  # of these lists while a log is read: another watch may have written between the lines of one


class WatchLog:
    """Appends moments to a file. A write error is reported once; the watch continues without the log."""

    def __init__(self, path: str | os.PathLike[str], report: Callable[[str], object]) -> None:
        self.path = Path(path)
        self._report = report
        self.failed = False  # readings are missing in the file
        self._lines = 0
        self._last: dict[str, tuple[float, int, object]] = {}  # of each such list: clock and number of its line, value
        try:
            # Unbuffered and appending: a line is one write, also when another process appends.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise UsageError(
                say("cannot write the log {path}", path=self.path),
                why=problem.strerror or str(problem),
                fix=(say("choose a file in an existing directory that you can write to"),),
            ) from problem
        try:
            if _ends_without_newline(self.path):
                self._file.write(b"\n")  # a watch was killed during a write; its partial line stays separate
        except OSError:
            pass  # a pipe or a device cannot be read

    def show(self, moment: Moment) -> None:
        if self._file.closed:
            return
        try:
            line = memoryview(_json(self._without_repeats(moment)).encode("utf-8", "replace") + b"\n")
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as problem:
            self._file.close()
            self.failed = True
            self._report(
                say(
                    "cannot write to {path} ({why}); the watch continues without a log",
                    path=self.path,
                    why=problem.strerror or problem,
                )
            )

    def close(self) -> None:
        self._file.close()

    def _without_repeats(self, moment: Moment) -> dict[str, Any]:
        sample, unchanged = moment.sample, {}
        self._lines += 1
        for name in REPEATED:
            value = getattr(sample, name)
            clock, line, last = self._last.get(name, (0.0, 0, None))
            if value and value == last and self._lines - line < _WRITTEN_AGAIN:
                unchanged[name] = clock
            else:
                self._last[name] = sample.clock, self._lines, value
        data = {name: value for name, value in moment_object(moment).items() if name not in unchanged}
        return {**data, "unchanged_since": unchanged} if unchanged else data


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Of each list that a line leaves out, the clock of the line that has it."""

    unchanged_since: Mapping[str, float] = field(default_factory=dict)


class _Repeats:
    """The lists of earlier lines of a log, for the lines that leave them out."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, float], Any] = {}

    def restored(self, data: dict[str, Any], sample: Sample) -> Sample:
        """The sample with the lists that its line leaves out; None where the line that has one could not be read."""
        for name in REPEATED:
            if getattr(sample, name):
                self._found.pop((name, sample.clock), None)
                self._found[name, sample.clock] = getattr(sample, name)
        for oldest in list(self._found)[: max(0, len(self._found) - _KEPT)]:
            del self._found[oldest]
        clocks = from_json(_Unchanged, data).unchanged_since
        unchanged: dict[str, Any] = {name: self._found.get((name, clocks[name])) for name in REPEATED if name in clocks}
        return replace(sample, **unchanged) if unchanged else sample


def read_samples(path: str | os.PathLike[str], report: Callable[[str], object]) -> Iterator[Sample]:
    """The samples of a log, one at a time. Unreadable lines are counted and reported at the end."""
    name = os.fspath(path)
    try:
        file, begin = open_to_its_end(name)
    except (OSError, ValueError) as problem:
        raise UnreadableSource(
            say("cannot read the log {path}", path=name),
            why=problem.strerror or str(problem) if isinstance(problem, OSError) else str(problem),
            fix=(say("pass a file written by legroom watch --log"),),
        ) from problem
    unreadable, truncated, found, repeats = 0, False, 0, _Repeats()
    clock, several = 0.0, False
    why = say("the file is empty")
    with file:
        while line := begin + _next_line(file.readline):
            begin = b""
            try:
                data = json.loads(line)
                sample = repeats.restored(data, parse_sample(data))
            except (ValueError, RecursionError) as problem:
                if not line.strip():
                    continue
                truncated = not line.endswith(b"\n")  # only the last line can have no end
                unreadable += 1
                if found == 0 and unreadable == 1:
                    text = str(problem) if isinstance(problem, InvalidRecord) else say("not JSON")
                    why = say("line 1: {problem}", problem=text)
                if found == 0 and not truncated and unreadable > 1:
                    break  # two lines and neither is a record: another kind of file
                continue
            found += 1
            several = several or _STARTED * sample.interval < sample.clock < clock  # a new watch starts at 0
            clock = sample.clock
            yield sample
    if not found:
        raise DamagedSource(
            say("{path} is not a log of legroom watch", path=name),
            why=why,
            fix=(say("pass a file written by legroom watch --log (lines of {schema})", schema=SCHEMA),),
        )
    if several:
        report(say("several watches wrote into {path} at once: leaks are not found in it", path=name))
    if truncated:
        unreadable -= 1
        report(say("skipped the last line of {path}: it is incomplete", path=name))
    if unreadable:
        lines = counted(unreadable, phrase("{count} line"), phrase("{count} lines"))
        report(say("skipped {lines} of {path}: not readable", lines=lines, path=name))


def json_line(moment: Moment) -> str:
    """The moment as one line of JSON, without the newline."""
    return _json(moment_object(moment))


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"), default=fields_of)


def moment_object(moment: Moment) -> dict[str, Any]:
    """The moment as a JSON object of the sample's fields; write it with ``default=fields_of``."""
    return {"schema": SCHEMA, **fields_of(moment.sample), "alarms": moment.alarms}


def parse_sample(data: object) -> Sample:
    """The sample of a JSON object; InvalidRecord where it is not one."""
    if isinstance(data, dict) and data.get("schema") != SCHEMA:
        raise InvalidRecord(f"schema must be {SCHEMA!r} (got {data.get('schema')!r})")
    return from_json(Sample, data)


def _ends_without_newline(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


def _next_line(readline: Callable[[int], bytes]) -> bytes:
    """The next line; of one that is too long only the beginning."""
    line = readline(_LONGEST_LINE)
    rest = line
    while rest and not rest.endswith(b"\n") and len(rest) == _LONGEST_LINE:
        rest = readline(_LONGEST_LINE)
        line = line[:1024] + b"\n"
    return line
