r"""A text as it may be read: as it stands, and with its escapes undone.

Covers: URL encoding (``%2F``), the escapes of JSON, Python and mountinfo (``\u002f``, ``\/``, ``\x2f``, ``\057``),
one inside another, with the place in the text that each character came from. Does not cover: what is looked for
(redact.py), encodings that change every character (base64, compression).

There is no one right reading: ``C:\bob`` has a backspace in it if it is JSON and a name if it is a path. So there
are several, and what is found in any of them counts.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

_PERCENT = re.compile(r"(?:%[0-9A-Fa-f]{2})+")
_NUMBER = r"\\[uU][0-9A-Fa-f]{4}|\\[xX][0-9A-Fa-f]{2}|\\[0-3][0-7]{2}"
_NUMBERS = re.compile(rf"(?:{_NUMBER})+")  # also right behind a backslash that is one: C:\\u00e9
_BACKSLASH = re.compile(rf"(?:{_NUMBER}|\\[\\/\"'bfnrtBFNRT])+")
_ONE = re.compile(r"\\([uU][0-9A-Fa-f]{4}|[xX][0-9A-Fa-f]{2}|[0-3][0-7]{2}|.)", re.DOTALL)
_SHORT = {"b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}
_ROUNDS = 3  # JSON in a URL in JSON


@dataclass(frozen=True, slots=True)
class Reading:
    """A text read one way; ``at[i]`` is where character i begins in what was written, ``at[-1]`` where it ends."""

    text: str
    at: list[int] | None  # None: as it was written

    def span(self, start: int, end: int) -> tuple[int, int]:
        """Where these characters stand in what was written."""
        return (start, end) if self.at is None else (self.at[start], self.at[end])


def readings(text: str) -> Iterator[Reading]:
    """Every way to read it, as it stands first; two ways that come to the same are one."""
    fresh = [Reading(text, None)]
    seen = {text}
    yield fresh[0]
    for _ in range(_ROUNDS):
        found: list[Reading] = []
        for reading in fresh:
            for pattern, undo in _UNDOING:
                other = _undone(reading, pattern, undo)
                if other is not None and other.text not in seen:
                    seen.add(other.text)
                    found.append(other)
                    yield other
        fresh = found


def _undone(
    reading: Reading, pattern: re.Pattern[str], undo: Callable[[str], Iterator[tuple[str, int]]]
) -> Reading | None:
    """The reading with one kind of escape undone; None where it has none."""
    parts: list[str] = []
    at: list[int] = []
    passed = 0
    old = reading.at if reading.at is not None else range(len(reading.text) + 1)
    for match in pattern.finditer(reading.text):
        parts.append(reading.text[passed : match.start()])
        at.extend(old[passed : match.start()])
        place = match.start()
        for character, length in undo(match[0]):
            parts.append(character)
            at.extend([old[place]] * len(character))
            place += length
        passed = match.end()
    if not passed:
        return None
    parts.append(reading.text[passed:])
    at.extend(old[passed:])  # one more than characters: the end
    return Reading("".join(parts), at)


def _from_percent(run: str) -> Iterator[tuple[str, int]]:
    """(character, how much of the run it took): UTF-8 where it is, else a byte a character."""
    data = bytes.fromhex(run.replace("%", ""))
    while data:
        for size in (1, 2, 3, 4):
            try:
                yield data[:size].decode("utf-8"), 3 * len(data[:size])
                data = data[size:]
                break
            except UnicodeDecodeError:
                continue
        else:
            yield chr(data[0]), 3
            data = data[1:]


def _from_backslashes(run: str) -> Iterator[tuple[str, int]]:
    """(character, how much of the run it took); two halves of a surrogate pair are one character."""
    units = [(_unit(match[1]), len(match[0])) for match in _ONE.finditer(run)]
    at = 0
    while at < len(units):
        code, length = units[at]
        following = units[at + 1] if at + 1 < len(units) else None
        if 0xD800 <= code < 0xDC00 and following is not None and 0xDC00 <= following[0] < 0xE000:
            yield chr(0x10000 + (code - 0xD800) * 0x400 + following[0] - 0xDC00), length + following[1]
            at += 2
            continue
        if (
            code >= 0x80 and length == 4
        ):  # bytes of UTF-8, one escape each, as Python's repr and mountinfo write
            taken = _utf8(units[at:])
            if taken is not None:
                yield taken
                at += taken[1] // 4
                continue
        yield chr(code), length
        at += 1


def _unit(escape: str) -> int:
    if len(escape) > 1:
        return int(escape, 8) if escape.isdecimal() and len(escape) == 3 else int(escape[1:], 16)
    return ord(_SHORT.get(escape.lower(), escape))


def _utf8(units: list[tuple[int, int]]) -> tuple[str, int] | None:
    for size in (2, 3, 4):
        some = units[:size]
        if len(some) == size and all(code < 256 and length == 4 for code, length in some):
            try:
                return bytes(code for code, _ in some).decode("utf-8"), 4 * size
            except UnicodeDecodeError:
                continue
    return None


_UNDOING = ((_PERCENT, _from_percent), (_BACKSLASH, _from_backslashes), (_NUMBERS, _from_backslashes))
