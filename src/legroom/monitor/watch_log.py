"""The log of a watch: one JSON object (``legroom.watch/1``) per line, written, appended and read back.

Fields have the names of the records in records.watch_sample, plus ``alarms``. Readers ignore unknown fields and use
the default of a missing one. A kill at any time costs at most the line being written.

What the cache and the groups hold seldom changes and takes most of a line. The log leaves such a list out while it is
the same, and ``unchanged_since`` has the clock of the line with it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import MISSING, Field, dataclass, fields, replace
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.messages import counted, phrase, say
from legroom.records.finding_and_alarm import Alarm
from legroom.records.machine import MemoryEvents, Pool, Pressure
from legroom.records.watch_sample import (
    Annotations,
    EntryRow,
    GpuCopyRow,
    GroupRow,
    GrowthRow,
    Mark,
    Moment,
    ProcessRow,
    ProcessSteps,
    Sample,
    TrainerRow,
)

SCHEMA = "legroom.watch/1"
Record = TypeVar("Record")

_LONGEST_LINE = 32 << 20  # bytes; a thousand processes take 300 kB
REPEATED = ("entries", "groups", "gpu_copies")  # left out of a line where they are as in an earlier one
_WRITTEN_AGAIN = 60  # lines after which they are written all the same: the beginning of a log may be removed
_KEPT = 64  # of these lists while a log is read: several watches may write into one
_JSON_TYPES: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


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
        data = moment_object(moment, without=tuple(unchanged))
        return {**data, "unchanged_since": unchanged} if unchanged else data


@dataclass(frozen=True, slots=True)
class _Clock:
    """A reference to a line."""

    clock: float


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
        references = {name: _build(_Clock, {"clock": clock}).clock
                      for name, clock in _object(data, "unchanged_since", {}).items() if name in REPEATED}  # fmt: skip
        unchanged: dict[str, Any] = {name: self._found.get((name, clock)) for name, clock in references.items()}
        return replace(sample, **unchanged) if unchanged else sample


def read_samples(path: str | os.PathLike[str], report: Callable[[str], object]) -> Iterator[Sample]:
    """The samples of a log, one at a time. Unreadable lines are counted and reported at the end."""
    name = os.fspath(path)
    try:
        file = open(path, "rb")  # noqa: SIM115
    except OSError as problem:
        raise UnreadableSource(
            say("cannot read the log {path}", path=name),
            why=problem.strerror or str(problem),
            fix=(say("pass a file written by legroom watch --log"),),
        ) from problem
    unreadable, truncated, found, repeats = 0, False, 0, _Repeats()
    why = say("the file is empty")
    with file:
        while line := _next_line(file.readline):
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
            yield sample
    if not found:
        raise DamagedSource(
            say("{path} is not a log of legroom watch", path=name),
            why=why,
            fix=(say("pass a file written by legroom watch --log (lines of {schema})", schema=SCHEMA),),
        )
    if truncated:
        unreadable -= 1
        report(say("skipped the last line of {path}: it is incomplete", path=name))
    if unreadable:
        lines = counted(unreadable, phrase("{count} line"), phrase("{count} lines"))
        report(say("skipped {lines} of {path}: not readable", lines=lines, path=name))


class InvalidRecord(ValueError):
    """The object is not a moment; the message names the field."""


def json_line(moment: Moment) -> str:
    """The moment as one line of JSON, without the newline."""
    return _json(moment_object(moment))


def _json(data: dict[str, Any]) -> str:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":"))


def moment_object(moment: Moment, *, without: Sequence[str] = ()) -> dict[str, Any]:
    """The moment as a JSON object; ``without`` names fields to leave out."""
    sample = moment.sample
    data = {
        "schema": SCHEMA,
        **_flat(sample),
        "pools": [_flat(pool) for pool in sample.pools],
        "processes": [_flat(row) for row in sample.processes],
        "pressure": [_flat(one) for one in sample.pressure],
        "events": _flat(sample.events),
        "said": {
            **_flat(sample.said),
            "components": dict(sample.said.components),
            "marks": [_flat(mark) for mark in sample.said.marks],
            "growing": [_flat(row) for row in sample.said.growing],
            "process_steps": [_flat(row) for row in sample.said.process_steps],
        },
        "entries": None if sample.entries is None else [_flat(entry) for entry in sample.entries],
        "groups": None
        if sample.groups is None
        else [{**_flat(group), "trainers": [_flat(one) for one in group.trainers]} for group in sample.groups],
        "gpu_copies": None
        if sample.gpu_copies is None
        else [{**_flat(copy), "users": list(copy.users)} for copy in sample.gpu_copies],
        "notes": list(sample.notes),
        "alarms": [alarm_object(alarm) for alarm in moment.alarms],
    }
    return {name: value for name, value in data.items() if name not in without} if without else data


def alarm_object(alarm: Alarm) -> dict[str, Any]:
    """The alarm as a JSON object."""
    return {**_flat(alarm), "evidence": dict(alarm.evidence), "pids": list(alarm.pids)}


def parse_sample(data: object) -> Sample:
    """The sample of a JSON object; InvalidRecord where it is not one."""
    if not isinstance(data, dict):
        raise InvalidRecord("not an object")
    if data.get("schema") != SCHEMA:
        raise InvalidRecord(f"schema must be {SCHEMA!r} (got {data.get('schema')!r})")
    said = _object(data, "said", {})
    entries = data.get("entries")
    return _build(
        Sample,
        {
            **data,
            "pools": tuple(_build(Pool, one) for one in _array(data, "pools")),
            "processes": tuple(_build(ProcessRow, one) for one in _array(data, "processes")),
            "pressure": tuple(_build(Pressure, one) for one in _array(data, "pressure")),
            "events": _build(MemoryEvents, _object(data, "events")),
            "said": _build(
                Annotations,
                {
                    **said,
                    "components": _components(_object(said, "components", {})),
                    "marks": tuple(_build(Mark, one) for one in _array(said, "marks", [])),
                    "growing": tuple(_build(GrowthRow, one) for one in _array(said, "growing", [])),
                    "process_steps": tuple(_build(ProcessSteps, one) for one in _array(said, "process_steps", [])),
                },
            ),
            "entries": None if entries is None else tuple(_build(EntryRow, one) for one in _array(data, "entries")),
            "groups": None if data.get("groups") is None else tuple(map(_group, _array(data, "groups"))),
            "gpu_copies": None if data.get("gpu_copies") is None else tuple(map(_gpu_copy, _array(data, "gpu_copies"))),
            "notes": tuple(str(note) for note in _array(data, "notes", [])),
        },
    )


def _group(data: object) -> GroupRow:
    if not isinstance(data, dict):
        raise InvalidRecord("GroupRow must be an object")
    return _build(GroupRow, {**data, "trainers": tuple(_build(TrainerRow, one) for one in _array(data, "trainers"))})


def _gpu_copy(data: object) -> GpuCopyRow:
    if not isinstance(data, dict):
        raise InvalidRecord("GpuCopyRow must be an object")
    users = _array(data, "users")
    if not all(isinstance(pid, int) for pid in users):
        raise InvalidRecord("GpuCopyRow.users must be integers")
    return _build(GpuCopyRow, {**data, "users": tuple(users)})


def _flat(record: Any) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)}


def _build(record: type[Record], data: object) -> Record:
    if not isinstance(data, dict):
        raise InvalidRecord(f"{record.__name__} must be an object")
    values = {}
    for one in fields(record):  # type: ignore[arg-type]
        if one.name in data:
            values[one.name] = _checked(record.__name__, one, data[one.name])
        elif one.default is MISSING and one.default_factory is MISSING:
            raise InvalidRecord(f"{record.__name__}.{one.name} is missing")
    return record(**values)


def _checked(owner: str, one: Field[Any], value: Any) -> Any:
    groups = [_JSON_TYPES.get(part) for part in str(one.type).split(" | ")]
    if None in groups:  # a nested record, built already
        return value
    allowed = tuple(kind for group in groups if group for kind in group)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise InvalidRecord(f"{owner}.{one.name} must be {one.type} (got {value!r})")
    return value


def _array(data: dict[str, Any], name: str, default: list[Any] | None = None) -> list[Any]:
    value = data.get(name, default)
    if not isinstance(value, list):
        raise InvalidRecord(f"{name} must be a list")
    return value


def _object(data: dict[str, Any], name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    value = data.get(name, default)
    if not isinstance(value, dict):
        raise InvalidRecord(f"{name} must be an object")
    return value


def _components(data: dict[str, Any]) -> dict[str, int]:
    if not all(isinstance(value, int) for value in data.values()):
        raise InvalidRecord("components must be integers (bytes)")
    return data


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
