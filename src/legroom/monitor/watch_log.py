"""The log of a watch: one JSON object (``legroom.watch/1``) per line, written, appended and read back.

Fields have the names of the records in records.watch_sample, plus ``alarms``. Readers ignore unknown fields and use
the default of a missing one. A kill at any time costs at most the line being written. `fields_of` writes a record, and
`from_json` reads it with the types that the record declares.

What the cache and the groups hold seldom changes and takes most of a line. The log leaves such a list out while it is
the same, and ``unchanged_since`` has the clock of the line with it. So has the row of a process of which nothing has
changed: most processes are idle, and their rows were two thirds of a log.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from functools import cache, partial
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.messages import counted, phrase, say
from legroom.records.watch_sample import Moment, ProcessRow, Sample
from legroom.system.open_file_or_pipe import open_to_its_end

SCHEMA = "legroom.watch/1"

_LONGEST_LINE = 32 << 20  # bytes; a thousand processes take 300 kB
REPEATED = ("entries", "groups", "gpu_copies")  # left out of a line where they are as in an earlier one
_WRITTEN_AGAIN = 60  # lines after which they are written all the same: the beginning of a log may be removed
_STARTED = 5  # intervals after which a watch has more than started
_KEPT = 64  # of these lists while a log is read: another watch may have written between the lines of one
_ROWS_KEPT = 1 << 14  # of processes, likewise: those of the last lines of every watch
_Place = tuple[int, float]  # of a process row: the pid, and the clock of its line


class WatchLog:
    """Appends moments to a file. A write error is reported once; the watch continues without the log."""

    def __init__(self, path: str | os.PathLike[str], report: Callable[[str], object]) -> None:
        self.path = Path(path)
        self._report = report
        self.failed = False  # readings are missing in the file
        self._lines = 0
        self._last: dict[str, tuple[float, int, object]] = {}  # of each such list: clock and number of its line, value
        self._rows: dict[int, tuple[float, int, ProcessRow]] = {}  # of each process: the same of its row
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
        data["processes"] = self._rows_without_repeats(sample)
        return {**data, "unchanged_since": unchanged} if unchanged else data

    def _rows_without_repeats(self, sample: Sample) -> list[ProcessRow | dict[str, float]]:
        before, self._rows = self._rows, {}
        rows: list[ProcessRow | dict[str, float]] = []
        for row in sample.processes:
            clock, line, last = before.get(row.pid, (0.0, 0, None))
            if row == last and self._lines - line < _WRITTEN_AGAIN:
                self._rows[row.pid] = clock, line, row
                rows.append({"pid": row.pid, "unchanged_since": clock})
            else:
                self._rows[row.pid] = sample.clock, self._lines, row
                rows.append(row)
        return rows


@dataclass(frozen=True, slots=True)
class _Unchanged:
    """Of each list that a line leaves out, the clock of the line that has it."""

    unchanged_since: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _UnchangedRow:
    """A process of which nothing has changed since the line with that clock."""

    pid: int
    unchanged_since: float


class _Repeats:
    """The lists and rows of earlier lines of a log, for the lines that leave them out."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, float], Any] = {}
        self._rows: dict[_Place, ProcessRow] = {}  # the least recently used first
        self._newest: dict[int, _Place] = {}

    def read(self, data: Any) -> Sample:
        """The sample of a line, with everything that it leaves out."""
        rows = data.get("processes") if isinstance(data, dict) else None
        if not isinstance(rows, list):
            return parse_sample(data)  # which refuses it
        unchanged = [isinstance(one, dict) and "unchanged_since" in one for one in rows]
        written = [one for one, same in zip(rows, unchanged, strict=True) if not same]
        sample = parse_sample({**data, "processes": written})
        new = iter(sample.processes)
        found = [
            self._row(from_json(_UnchangedRow, one)) if same else self._keep(sample.clock, next(new))
            for one, same in zip(rows, unchanged, strict=True)
        ]
        if any(unchanged):
            sample = replace(sample, processes=tuple(row for row in found if row is not None))
        return self._restored(data, sample)

    def _row(self, one: _UnchangedRow) -> ProcessRow | None:
        """A row as it was written before; where that line could not be read the newest one, or None."""
        place = one.pid, one.unchanged_since
        if place not in self._rows:
            place = self._newest.get(one.pid, place)
        row = self._rows.pop(place, None)
        return None if row is None else self._keep(place[1], row)

    def _keep(self, clock: float, row: ProcessRow) -> ProcessRow:
        place = row.pid, clock
        self._rows.pop(place, None)
        self._rows[place] = row
        self._newest[row.pid] = place
        while len(self._rows) > _ROWS_KEPT:
            oldest = next(iter(self._rows))
            del self._rows[oldest]
            if self._newest.get(oldest[0]) == oldest:
                del self._newest[oldest[0]]
        return row

    def _restored(self, data: dict[str, Any], sample: Sample) -> Sample:
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
                sample = repeats.read(data)
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


Record = TypeVar("Record")
_SCALARS = {int: (int,), float: (int, float), str: (str,), bool: (bool,), NoneType: (NoneType,)}
_LONGEST = 80  # characters of a wrong value in a message


class InvalidRecord(ValueError):
    """The object is not such a record; the message names the field."""


def fields_of(record: Any) -> dict[str, Any]:
    """The fields by name, records in them as they are: ``json.dumps(record, default=fields_of)``."""
    return {name: getattr(record, name) for name in _names(cast(Any, type(record)))}


def from_json(kind: type[Record], data: object) -> Record:
    """The record of a JSON object; unknown fields are ignored, missing ones have their default.

    Fields are numbers, text, bool, None, records, ``tuple[X, ...]`` and mappings of these.
    """
    if not isinstance(data, dict):
        raise InvalidRecord(f"{kind.__name__} must be an object")
    values = {}
    for name, declared, required, read in _readers(cast(Any, kind)):
        if name in data:
            try:
                values[name] = read(data[name])
            except InvalidRecord:
                raise  # of a record in it
            except ValueError:
                got = repr(data[name])[:_LONGEST]
                raise InvalidRecord(f"{kind.__name__}.{name} must be {declared} (got {got})") from None
        elif required:
            raise InvalidRecord(f"{kind.__name__}.{name} is missing")
    return kind(**values)


@cache
def _names(kind: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _readers(kind: Any) -> tuple[tuple[str, str, bool, Callable[[Any], Any]], ...]:
    """Of each field: name, type in words, whether it has no default, what reads its value."""
    hints = get_type_hints(kind)
    return tuple(
        (field.name, str(field.type), field.default is MISSING and field.default_factory is MISSING,
         _reader(hints[field.name]))
        for field in fields(kind)
    )  # fmt: skip


def _reader(hint: Any) -> Callable[[Any], Any]:
    """Turns a JSON value into that type; ValueError where it is another."""
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else (hint,)
    scalars = frozenset(kind for part in parts for kind in _SCALARS.get(part, ()))
    nested = next((_nested(part) for part in parts if part not in _SCALARS), None)

    def read(value: Any) -> Any:
        if type(value) in scalars:  # not isinstance: True is no integer here
            return value
        if nested is None:
            raise ValueError
        return nested(value)

    return read


def _nested(hint: Any) -> Callable[[Any], Any]:
    if is_dataclass(hint):
        return partial(from_json, cast(Any, hint))
    kind, read = get_origin(hint), _reader(get_args(hint)[-1 if get_origin(hint) is Mapping else 0])

    def read_all(value: Any) -> Any:
        if kind is Mapping and type(value) is dict:
            return {name: read(one) for name, one in value.items()}
        if kind is tuple and type(value) is list:
            return tuple(map(read, value))
        raise ValueError

    return read_all
