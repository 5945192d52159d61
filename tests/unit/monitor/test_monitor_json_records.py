"""Records as JSON: read back as they were; what has another type is refused with the name of the field."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from legroom.monitor.watch_log import InvalidRecord, fields_of, from_json


@dataclass(frozen=True, slots=True)
class _Part:
    name: str
    share: float = 0.5


@dataclass(frozen=True, slots=True)
class _Whole:
    count: int
    known: bool | None
    parts: tuple[_Part, ...] | None = None
    pids: tuple[int, ...] = ()
    held: Mapping[str, int | str] = field(default_factory=dict)
    best: _Part | None = None


WHOLE = _Whole(3, None, (_Part("a"), _Part("b", 1)), (7, 8), {"x": 1, "y": "z"}, _Part("c"))


def test_a_record_comes_back_as_it_was() -> None:
    assert from_json(_Whole, json.loads(json.dumps(WHOLE, default=fields_of))) == WHOLE
    assert from_json(_Whole, {"count": 3, "known": True, "parts": None, "invented": 1}) == _Whole(3, True)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        ([], "_Whole must be an object"),
        ({"known": None}, "_Whole.count is missing"),
        ({"count": True, "known": None}, "_Whole.count must be int (got True)"),
        ({"count": 1, "known": 0}, "_Whole.known must be bool | None (got 0)"),
        ({"count": 1, "known": None, "parts": {}}, "_Whole.parts must be tuple[_Part, ...] | None (got {})"),
        ({"count": 1, "known": None, "parts": [1]}, "_Part must be an object"),
        ({"count": 1, "known": None, "parts": [{"name": None}]}, "_Part.name must be str (got None)"),
        ({"count": 1, "known": None, "pids": [1.5]}, "_Whole.pids must be tuple[int, ...] (got [1.5])"),
        ({"count": 1, "known": None, "held": {"x": None}}, "_Whole.held must be Mapping[str, int | str] (got {'x': None})"),
        ({"count": "9" * 999, "known": None}, f"_Whole.count must be int (got '{'9' * 79})"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(data: object, why: str) -> None:
    with pytest.raises(InvalidRecord) as caught:
        from_json(_Whole, data)
    assert str(caught.value) == why
