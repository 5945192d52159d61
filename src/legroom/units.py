"""Read and print sizes (``64m``, ``1.5GiB``) and durations (``7d``, ``1h30m``); read counts of parameters (``1.5B``).

As in docker, every unit of a size is a power of 1024 whether it is written ``M``, ``MB`` or ``MiB``.
``docker --shm-size=64m``, ``df -h``, ``free -h`` and ``mount -o size=64m`` all mean the same 67108864,
so a number printed here can be pasted there (docs/decisions/0003-units.md). Counts are decimal, as model names are.
"""

from __future__ import annotations

import re
from fractions import Fraction
from math import ceil
from operator import index
from typing import SupportsIndex

from legroom.errors import BadDuration, BadSize, UsageError
from legroom.messages import say

_UNITS = "BKMGTPE"
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?|\.[0-9]+)\s*(?:([kmgtpe])(?:i?b)?|(b|bytes?))?\s*", re.I | re.A)
_COUNT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([kmbgt]?)\s*", re.I | re.A)
_POWERS = {"": 0, "k": 3, "m": 6, "b": 9, "g": 9, "t": 12}  # of ten
_PART = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*([a-z]*)\s*", re.I | re.A)
_SECONDS: dict[str, int | Fraction] = {
    "ms": Fraction(1, 1000), "s": 1, "sec": 1, "second": 1, "m": 60, "min": 60, "minute": 60,
    "h": 3600, "hour": 3600, "d": 86400, "day": 86400, "w": 604800, "week": 604800,
}  # fmt: skip


def parse_size(text: str | SupportsIndex) -> int:
    """Read a size in bytes; a bare number is bytes, a fraction of a byte is rounded up."""
    try:
        count = None if isinstance(text, (str, bool)) else index(text)  # numpy's integers are integers too
    except TypeError:
        count = None
    if count is not None:
        if count < 0:
            raise _bad_size(str(text))
        return count
    match = _SIZE.fullmatch(text) if isinstance(text, str) else None
    if match is None:
        raise _bad_size(str(text))
    number, letter, _ = match.groups()
    power = _UNITS.index(letter.upper()) if letter else 0
    exact = Fraction(number) * int(1024**power)
    return ceil(exact)


def _bad_size(text: str) -> BadSize:
    return BadSize(
        say("cannot read {text!r} as a size", text=text),
        why=say("a size is a number ≥ 0 and a unit: B, K, M, G, T, P or E, written as M, MB or MiB"),
        fix=(say("write it like 64MB, 1.5GiB, 8G or 67108864"),),
    )


def format_size(count: int) -> str:
    """Three significant digits for people: ``64 MB``, ``1.5 GB``, ``276 MB``."""
    if count < 0:
        return "-" + format_size(-count)
    power = max(0, (count.bit_length() - 1) // 10)
    power = min(power, len(_UNITS) - 1)
    if power == 0:
        return f"{count} B"
    value = Fraction(count, 1024**power)
    digits = 2 if value < 10 else 1 if value < 100 else 0
    shown = f"{float(value):.{digits}f}"
    if float(shown) >= 1024 and power < len(_UNITS) - 1:  # 1023.7 MB would be printed as 1024 MB
        power, shown = power + 1, "1"
    if "." in shown:
        shown = shown.rstrip("0").rstrip(".")
    return f"{shown} {_UNITS[power]}B"


def size_or_unknown(count: int | None) -> str:
    """The size as `format_size` writes it, or that it is unknown."""
    return say("unknown") if count is None else format_size(count)


def exact_size(count: int) -> str:
    """The shortest text that reads back as exactly ``count``: for commands and files, not for prose."""
    if count < 0:
        raise _bad_size(str(count))
    power = 0
    while count and count % 1024 == 0 and power < len(_UNITS) - 1:
        count //= 1024
        power += 1
    return f"{count}{_UNITS[power] if power else ''}"


def parse_count(text: str) -> int:
    """Read a number of parameters: ``125M``, ``1.5B``. Powers of 1000, unlike sizes."""
    match = _COUNT.fullmatch(text)
    if match is None:
        raise UsageError(say("{value!r} is not a number of parameters; write it as 125M or 1.5B", value=text))
    number, unit = match.groups()
    return int(Fraction(number) * 10 ** _POWERS[unit.lower()])


def parse_duration(text: str | float) -> float:
    """Read a duration in seconds; a bare number is seconds."""
    if isinstance(text, (int, float)) and not isinstance(text, bool):
        if not 0 <= text < float("inf"):
            raise _bad_duration(str(text))
        return float(text)
    total, rest = Fraction(0), str(text)
    if not rest.strip():
        raise _bad_duration(str(text))
    bare = False
    while rest:
        match = _PART.match(rest)
        if match is None or bare:
            raise _bad_duration(str(text))
        number, unit = match.groups()
        scale = _SECONDS.get(unit.lower()) or _SECONDS.get(unit.lower().removesuffix("s"))
        if unit and scale is None:
            raise _bad_duration(str(text))
        bare = not unit
        total += Fraction(number) * (scale or 1)
        rest = rest[match.end() :]
    return float(total)


def _bad_duration(text: str) -> BadDuration:
    return BadDuration(
        say("cannot read {text!r} as a duration", text=text),
        why=say("a duration is numbers with units: ms, s, m, h, d or w; a bare number is seconds"),
        fix=(say("write it like 10s, 1.5h, 7d or 1h30m"),),
    )


def format_duration(seconds: float) -> str:
    """The two largest units that matter: ``850 ms``, ``12 s``, ``6 min 5 s``, ``3 d 4 h``."""
    if seconds < 0:
        return "-" + format_duration(-seconds)
    if seconds < 0.9995:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 9.95:
        return f"{seconds:.1f}".removesuffix(".0") + " s"
    whole = round(seconds)
    for unit, name, lower, lower_name in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit:
            rest = whole % unit // lower
            return f"{whole // unit} {name}" + (f" {rest} {lower_name}" if rest else "")
    return f"{whole} s"
