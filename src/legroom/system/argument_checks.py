"""Check arguments of public functions and of the command line; what is out of range raises UsageError."""

from __future__ import annotations

from collections.abc import Collection
from math import inf
from operator import index
from typing import Any, cast

from legroom.errors import UsageError
from legroom.messages import listed, say

_MOST = 1 << 64  # a word of the random generators' keys


def check_integer(name: str, value: object, least: int) -> int:
    """The value as an int; numpy's integers are integers too, True and 2.0 are not."""
    try:
        number = None if isinstance(value, bool) else index(cast(Any, value))
    except TypeError:
        number = None
    if number is None or number < least:
        raise UsageError(
            say("{name} must be an integer >= {least} (got {value!r})", name=name, least=least, value=value),
            fix=(say("pass {name}={least} or more", name=name, least=least),),
        )
    if number >= _MOST:
        raise UsageError(
            say("{name} must be less than 2**64 (got {value!r})", name=name, value=value),
            fix=(say("pass {name}={least} or more", name=name, least=least),),
        )
    return number


def check_seconds(name: str, value: float) -> float:
    """The value, if it is finite and not negative."""
    if not 0 <= value < inf:
        raise UsageError(
            say("{name} must be a number of seconds >= 0 (got {value!r})", name=name, value=value),
            fix=(f"{name}=0.018",),
        )
    return value


def check_choice(name: str, value: object, choices: Collection[str]) -> None:
    """Whether the value is one of the choices."""
    if value not in choices:
        raise UsageError(
            say("{name} must be one of {choices} (got {value!r})", name=name, choices=listed(choices), value=value),
            fix=(f"{name}={next(iter(choices))!r}",),
        )
