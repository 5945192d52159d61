"""Settings that one program hands to another through the environment.

Covers: the variable ``LEGROOM_SETTINGS``, a JSON object of setting → value, written and read. Does not cover: who sets
it (a supervisor that starts the training again with less) and who obeys it (tune, as overrides).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.words import listed, say

VARIABLE = "LEGROOM_SETTINGS"

_COUNTS = {
    "batch_size": 1,
    "accumulation": 1,
    "ranks": 1,
    "num_workers": 0,
    "prefetch_factor": 1,
    "threads": 1,
}
_SWITCHES = ("persistent_workers", "pin_memory", "low_memory")
_WORDS = {"loader_kind": ("torch", "legroom")}
NAMES = (*_COUNTS, *_SWITCHES, "allocator", *_WORDS)
ALIASES = {
    "workers": "num_workers",
    "prefetch": "prefetch_factor",
    "batch": "batch_size",
    "loader": "loader_kind",
}


def to_environment(settings: Mapping[str, Any]) -> str:
    """The variable's value; what is None is left out, because it says nothing."""
    return json.dumps(checked({name: value for name, value in settings.items() if value is not None}))


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the environment asks for; none where it says nothing."""
    text = environment.get(VARIABLE)
    if not text:
        return {}
    try:
        read = json.loads(text)
    except ValueError as problem:
        raise _bad(say("{name} is no JSON: {why}", name=VARIABLE, why=problem)) from None
    if not isinstance(read, dict):
        raise _bad(say("{name} is no JSON object", name=VARIABLE))
    return checked(read)


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, each with a value that it can have."""
    result: dict[str, Any] = {}
    for given, value in settings.items():
        name = ALIASES.get(given, given)
        if name not in NAMES:
            raise _bad(say("no setting is called {name!r}", name=given))
        if not _possible(name, value):
            raise _bad(say("{name} cannot be {value!r}", name=name, value=value))
        result[name] = value
    return result


def read_word(name: str, text: str) -> Any:
    """A value as a command line spells it: ``2``, ``on``, ``expandable_segments:True``."""
    name = ALIASES.get(name, name)
    if name in _COUNTS:
        try:
            return int(text)
        except ValueError:
            return text
    if name in _SWITCHES:
        word = text.lower()
        return (
            True
            if word in ("on", "true", "yes", "1")
            else False
            if word in ("off", "false", "no", "0")
            else text
        )
    return text


def _possible(name: str, value: Any) -> bool:
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= _COUNTS[name]
    if name in _SWITCHES:
        return isinstance(value, bool)
    return isinstance(value, str) and value in _WORDS.get(name, (value,))


def _bad(what: str) -> UsageError:
    return UsageError(
        what,
        why=say("settings are {names}", names=listed(NAMES)),
        fix=(say("write num_workers=2 on a command line, a JSON object in {name}", name=VARIABLE),),
    )
