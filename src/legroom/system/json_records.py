"""Records as JSON objects: `fields_of` for writing, `from_json` for reading with the types that the record declares."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields, is_dataclass
from functools import cache, partial
from types import NoneType, UnionType
from typing import Any, TypeVar, Union, cast, get_args, get_origin, get_type_hints

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
