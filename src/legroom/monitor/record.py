"""Moments as JSON objects, there and back.

Covers: ``legroom.watch/1``, one object a line. Does not cover: files (log.py, replay.py).

The names are those of the records in model.sample; ``alarms`` is added. Readers leave fields alone that they do not
know, and take a missing one for its default where it has one.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, Field, fields
from typing import Any, TypeVar

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


class NotARecord(ValueError):
    """An object that is no moment; the text says what is wrong with it."""


def line_of(moment: Moment) -> str:
    """The moment as one line of JSON, without its end."""
    return json.dumps(object_of(moment), ensure_ascii=False, separators=(",", ":"))


def object_of(moment: Moment) -> dict[str, Any]:
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


def sample_of(data: object) -> Sample:
    """The sample of such an object; NotARecord where it is none."""
    if not isinstance(data, dict):
        raise NotARecord(say("not an object"))
    if data.get("schema") != SCHEMA:
        raise NotARecord(
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
        raise NotARecord(say("a {kind} that is no object", kind=kind.__name__))
    values = {}
    for one in fields(kind):  # type: ignore[arg-type]
        if one.name in data:
            values[one.name] = _checked(kind.__name__, one, data[one.name])
        elif one.default is MISSING and one.default_factory is MISSING:
            raise NotARecord(say("a {kind} without {name}", kind=kind.__name__, name=one.name))
    return kind(**values)


def _checked(owner: str, one: Field[Any], value: Any) -> Any:
    kinds = [_PLAIN.get(part) for part in str(one.type).split(" | ")]
    if None in kinds:  # a record of its own, built already
        return value
    wanted = tuple(kind for group in kinds if group for kind in group)
    if not isinstance(value, wanted) or (isinstance(value, bool) and bool not in wanted):
        raise NotARecord(
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
        raise NotARecord(say("{name} is no list", name=name))
    return value


def _object(data: dict[str, Any], name: str, default: dict[str, Any] | None = None) -> dict[str, Any]:
    value = data.get(name, default)
    if not isinstance(value, dict):
        raise NotARecord(say("{name} is no object", name=name))
    return value


def _amounts(data: dict[str, Any]) -> dict[str, int]:
    if not all(isinstance(value, int) for value in data.values()):
        raise NotARecord(say("components are not whole numbers of bytes"))
    return data
