r"""Every way to read a text: as it stands, and with its escapes undone.

Undone are URL encoding (``%2F``) and escapes of JSON, Python and mountinfo (``\u002f``, ``\/``, ``\x2f``, ``\057``),
also one inside another. ``C:\bob`` is a path, or a backspace if it is JSON, so there are several readings, and what is
found in any of them counts. Each character knows where it stands in the original text.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_NUMBER = r"\\[uU][0-9A-Fa-f]{4}|\\[xX][0-9A-Fa-f]{2}|\\[0-3][0-7]{2}"
# Runs of escapes: the last kind also right behind a backslash that is one, as in C:\\u00e9.
_RUNS = tuple(
    re.compile(f"(?:{one})+") for one in (r"%[0-9A-Fa-f]{2}", rf"{_NUMBER}|\\[\\/\"'bfnrtBFNRT]", _NUMBER)
)
_ESCAPE = re.compile(
    r"%([0-9A-Fa-f]{2})|\\([uU][0-9A-Fa-f]{4}|[xX][0-9A-Fa-f]{2}|[0-3][0-7]{2}|.)", re.DOTALL
)
_ROUNDS = 3  # JSON in a URL in JSON


@dataclass(frozen=True, slots=True)
class Reading:
    """A text read one way; ``at[i]`` is where character i begins in the original, ``at[-1]`` where the text ends."""

    text: str
    at: list[int] | None  # None: as it stands

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where these characters stand in the original."""
        return (start, end) if self.at is None else (self.at[start], self.at[end])


def readings(text: str) -> Iterator[Reading]:
    """Every different reading, the text as it stands first."""
    fresh = [Reading(text, None)]
    seen = {text}
    yield fresh[0]
    for _ in range(_ROUNDS):
        found: list[Reading] = []
        for reading in fresh:
            for pattern in _RUNS:
                other = _unescaped(reading, pattern)
                if other is not None and other.text not in seen:
                    seen.add(other.text)
                    found.append(other)
                    yield other
        fresh = found


def _unescaped(reading: Reading, runs: re.Pattern[str]) -> Reading | None:
    """The reading with one kind of escape undone; None where it has none."""
    parts: list[str] = []
    at: list[int] = []
    passed = 0
    old = reading.at if reading.at is not None else range(len(reading.text) + 1)
    for match in runs.finditer(reading.text):
        parts.append(reading.text[passed : match.start()])
        at.extend(old[passed : match.start()])
        place = match.start()
        for character, length in _characters(match[0]):
            parts.append(character)
            at.append(old[place])
            place += length
        passed = match.end()
    if not passed:
        return None
    parts.append(reading.text[passed:])
    at.extend(old[passed:])  # one more than characters: the end
    return Reading("".join(parts), at)


def _characters(run: str) -> Iterator[tuple[str, int]]:
    """(character, length of its escapes): bytes of UTF-8 are one character, and so are two surrogates."""
    units = [_unit(match) for match in _ESCAPE.finditer(run)]
    at = 0
    while at < len(units):
        count, character = next(
            (size, text)
            for size in (4, 3, 2, 1)
            if (text := _character(units[at : at + size], size)) is not None
        )
        yield character, sum(length for _, length in units[at : at + count])
        at += count


def _unit(escape: re.Match[str]) -> tuple[int, int]:
    """(code, length of the escape); a length of 3 or 4 is a byte, of 6 a UTF-16 unit, of 2 a character."""
    byte, other = escape.groups()
    if byte is not None:
        code = int(byte, 16)
    elif len(other) > 1:
        code = int(other, 8) if len(other) == 3 and other.isdecimal() else int(other[1:], 16)
    else:
        code = ord(_SHORT.get(other.lower(), other))
    return code, len(escape[0])


def _character(units: list[tuple[int, int]], size: int) -> str | None:
    """The one character that these escapes are, or None."""
    codes = [code for code, _ in units]
    if size == 1:
        return chr(codes[0])
    if len(codes) == size and all(length in (3, 4) for _, length in units) and codes[0] >= 0x80:
        try:
            text = bytes(codes).decode("utf-8")
            return text if len(text) == 1 else None
        except UnicodeDecodeError:
            return None
    if size == 2 == len(codes) and 0xD800 <= codes[0] < 0xDC00 <= codes[1] < 0xE000:
        return chr(0x10000 + (codes[0] - 0xD800) * 0x400 + codes[1] - 0xDC00)
    return None
