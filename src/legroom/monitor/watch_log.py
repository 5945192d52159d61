"""Moments as JSON objects, there and back.

Covers: ``legroom.watch/1``, one object a line. Does not cover: files (log.py, replay.py).

The names are those of the records in model.sample; ``alarms`` is added. Readers leave fields alone that they do not
know, and take a missing one for its default where it has one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from dataclasses import MISSING, Field, fields
from pathlib import Path
from typing import Any, TypeVar

from legroom.errors import DamagedSource, UnreadableSource, UsageError
from legroom.model import (
    Alarm,
    EntryRow,
    Mark,
    MemoryEvents,
    Moment,
    Pool,
    Pressure,
    ProcessRow,
    Said,
    Sample,
)
from legroom.words import say

SCHEMA = "legroom.watch/1"
Record = TypeVar("Record")

_PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
}


class InvalidRecord(ValueError):
    """An object that is no moment; the text says what is wrong with it."""


def json_line(moment: Moment) -> str:
    """The moment as one line of JSON, without its end."""
    return json.dumps(moment_object(moment), ensure_ascii=False, separators=(",", ":"))


def moment_object(moment: Moment) -> dict[str, Any]:
    """The moment as other programs read it."""
    sample = moment.sample
    return {
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
        },
        "entries": None if sample.entries is None else [_flat(entry) for entry in sample.entries],
        "notes": list(sample.notes),
        "alarms": [alarm_object(alarm) for alarm in moment.alarms],
    }


def alarm_object(alarm: Alarm) -> dict[str, Any]:
    """An alarm as other programs read it."""
    return {**_flat(alarm), "evidence": dict(alarm.evidence), "pids": list(alarm.pids)}


def parse_sample(data: object) -> Sample:
    """The sample of such an object; NotARecord where it is none."""
    if not isinstance(data, dict):
        raise InvalidRecord(say("not an object"))
    if data.get("schema") != SCHEMA:
        raise InvalidRecord(
            say("its schema is {schema!r}, not {ours!r}", schema=data.get("schema"), ours=SCHEMA)
        )
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
                Said,
                {
                    **said,
                    "components": _amounts(_object(said, "components", {})),
                    "marks": tuple(_build(Mark, one) for one in _array(said, "marks", [])),
                },
            ),
            "entries": None
            if entries is None
            else tuple(_build(EntryRow, one) for one in _array(data, "entries")),
            "notes": tuple(str(note) for note in _array(data, "notes", [])),
        },
    )


def _flat(record: Any) -> dict[str, Any]:
    return {one.name: getattr(record, one.name) for one in fields(record)}


def _build(kind: type[Record], data: object) -> Record:
    if not isinstance(data, dict):
        raise InvalidRecord(say("a {kind} that is no object", kind=kind.__name__))
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name in data:
            values[one.name] = _checked(kind.__name__, one, data[one.name])
        elif one.default is MISSING and one.default_factory is MISSING:
            raise InvalidRecord(say("a {kind} without {name}", kind=kind.__name__, name=one.name))
    return kind(**values)


def _checked(owner: str, one: Field[Any], value: Any) -> Any:
    kinds = [_PLAIN.get(part) for part in str(one.type).split(" | ")]
    if None in kinds:  # a record of its own, built already
        return value
    wanted = tuple(kind for group in kinds if group for kind in group)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise InvalidRecord(
            say(
                "{owner}.{name} is {value!r}, not {type}",
                owner=owner,
                name=one.name,
                value=value,
                type=one.type,
            )
        )
    return value


def _array(data: dict[str, Any], name: str, default: list[Any] | None = None) -> list[Any]:
    value = data.get(name, default)
    if not isinstance(value, list):
        raise InvalidRecord(say("{name} is no list", name=name))
    return value


def _object(data: dict[str, Any], name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    value = data.get(name, default)
    if not isinstance(value, dict):
        raise InvalidRecord(say("{name} is no object", name=name))
    return value


def _amounts(data: dict[str, Any]) -> dict[str, int]:
    if not all(isinstance(value, int) for value in data.values()):
        raise InvalidRecord(say("components are not whole numbers of bytes"))
    return data


class WatchLog:
    """Appends to a file. Trouble on the way (a full disk) is told once; watching goes on without the log."""

    def __init__(self, path: str | os.PathLike[str], tell: Callable[[str], object]) -> None:
        self.path = Path(path)
        self._tell = tell
        try:
            # Unbuffered and appending: a line is one write, whoever else appends to the file.
            self._file = open(self.path, "ab", buffering=0)  # noqa: SIM115
        except OSError as problem:
            raise UsageError(
                say("cannot write the log {path}", path=self.path),
                why=problem.strerror or str(problem),
                fix=(say("name a file in a directory that exists and is yours to write in"),),
            ) from problem
        try:
            if _ends_in_the_middle(self.path):
                self._file.write(b"\n")  # a watch was killed while it wrote; its half line stays its own
        except OSError:
            pass  # a pipe or a device: nothing to look at

    def show(self, moment: Moment) -> None:
        if self._file.closed:
            return
        try:
            line = memoryview(json_line(moment).encode("utf-8", "replace") + b"\n")
            while line:
                line = line[self._file.write(line) or 0 :]
        except OSError as problem:
            self._file.close()
            self._tell(
                say(
                    "cannot write to {path} any more ({why}); watching goes on without a log",
                    path=self.path,
                    why=problem.strerror or problem,
                )
            )

    def close(self) -> None:
        self._file.close()


def _ends_in_the_middle(path: Path) -> bool:
    with open(path, "rb") as file:
        if file.seek(0, os.SEEK_END) == 0:
            return False
        file.seek(-1, os.SEEK_END)
        return file.read(1) != b"\n"


_LONGEST = 32 << 20  # bytes of a line: a thousand processes take 300 kB


def read_samples(path: str | os.PathLike[str], tell: Callable[[str], object]) -> Iterator[Sample]:
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
                sample = parse_sample(json.loads(raw))
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
    return str(problem) if isinstance(problem, InvalidRecord) else say("not JSON")
