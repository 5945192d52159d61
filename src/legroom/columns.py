"""Text by the columns it takes on a screen, where a Chinese character takes two.

Covers: measuring, padding, cutting and wrapping. Does not cover: how wide the screen is, colours (layout).
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from unicodedata import combining, east_asian_width

# Marks that belong to the character before them, and those that belong to the one after: no line begins or ends there.
_CLOSING = "，。：；、！？）》」』】〉％…—”’)]},.;:!?"
_OPENING = "（《「『【〈“‘"
_SPACE = re.compile(r"(\s+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def cells(text: str) -> int:
    """The columns a text takes on a screen, colours not counted."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    return sum(_cells(letter) for letter in _COLOUR.sub("", text))


def _cells(letter: str) -> int:
    if combining(letter):
        return 0
    return 2 if east_asian_width(letter) in "WF" else 1


def left(text: str, columns: int) -> str:
    """The text at the left of so many columns."""
    return text + " " * (columns - cells(text))


def right(text: str, columns: int) -> str:
    """The text at the right of so many columns."""
    return " " * (columns - cells(text)) + text


def cut(line: str, columns: int) -> str:
    """One line, cut to so many columns with a mark where it was."""
    if cells(line) <= columns:
        return line
    room, kept = columns - 1, ""
    for letter in line:
        room -= _cells(letter)
        if room < 0:
            break
        kept += letter
    return kept + "…"


def fill(text: str, columns: int, first: str, rest: str) -> str:
    """The text wrapped; commands are never broken at a hyphen or inside a word, Chinese between any two characters."""
    if len(text) == cells(text) and len(first) == cells(first):
        return textwrap.fill(
            text,
            width=columns,
            initial_indent=first,
            subsequent_indent=rest,
            break_long_words=False,
            break_on_hyphens=False,
        )
    lines: list[str] = []
    line, bare = first, True
    for part in _parts(text.strip()):
        if not bare and cells(line) + cells(part.rstrip()) > columns:
            lines.append(line.rstrip())
            line, bare = rest, True
        if bare and part.isspace():
            continue
        line, bare = line + part, False
    return "\n".join([*lines, line.rstrip()])


def _parts(text: str) -> Iterator[str]:
    """What may not be broken: words, spaces, and single wide characters with the marks around them."""
    for word in _SPACE.split(text):
        part = ""
        for letter in word:
            apart = part and (cells(part[-1]) == 2 or cells(letter) == 2)
            if apart and letter not in _CLOSING and part[-1] not in _OPENING:
                yield part
                part = ""
            part += letter
        if part:
            yield " " if part.isspace() else part
