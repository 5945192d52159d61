"""Expand ``shard-{000..127}.tar`` and ``{train,val}.npy`` into names, as bash and WebDataset (braceexpand) do.

Differences to braceexpand: braces that are not balanced, or nested too deep, are left as they are, and a pattern that
stands for too many names is refused before they are made.
"""

from __future__ import annotations

import itertools
import re
import string

from legroom.errors import UsageError
from legroom.messages import say

MOST_NAMES = 1_000_000
_DEEPEST = 50
_NUMBERS = re.compile(r"(-?[0-9]{1,15})\.\.(-?[0-9]{1,15})(?:\.\.-?([0-9]{1,15}))?")
_LETTERS = re.compile(r"([A-Za-z])\.\.([A-Za-z])(?:\.\.-?([0-9]{1,15}))?")
_ALPHABET = string.ascii_uppercase + string.ascii_lowercase


class _Unbalanced(Exception):
    pass


def expand_braces(text: str) -> list[str] | None:
    r"""The names that a text with braces stands for, in order; None: it has no braces that stand for anything.

    ``\{`` is the brace itself. In a URL neither user and password nor the query are expanded.
    """
    if "{" not in text:
        return None
    head, tail = "", ""
    scheme, mark, rest = text.partition("://")
    if mark:
        authority, slash, path = rest.partition("/")
        user, at, host = authority.rpartition("@")
        path, question, query = path.partition("?")
        head, text, tail = scheme + mark + user + at, host + slash + path, question + query
    try:
        found = [head + re.sub(r"\\(.)", r"\1", name) + tail for name in _pattern(text)]
    except _Unbalanced:
        return None
    return None if found == [head + text + tail] else found


def _pattern(text: str, depth: int = 0) -> list[str]:
    """Every combination of the parts of a text. Backslashes stay until the end."""
    if depth > _DEEPEST:
        raise _Unbalanced
    parts: list[list[str]] = []
    start = open_ = 0
    for at, mark in _marks(text, "{}"):
        if mark == "{":
            if open_ == 0 and at > start:
                parts.append([text[start:at]])
                start = at
            open_ += 1
            continue
        open_ -= 1
        if open_ < 0:
            raise _Unbalanced
        if open_ == 0:
            inner = text[start + 1 : at]
            names = _range(inner)
            if names is None:
                names = _sequence(inner, depth)
            parts.append(["{" + name + "}" for name in _pattern(inner, depth + 1)] if names is None else names)
            start = at + 1
    if open_:
        raise _Unbalanced
    parts.append([text[start:]])
    count = 1
    for part in parts:
        count *= len(part)
        _require_few(count)
    return ["".join(one) for one in itertools.product(*parts)]


def _sequence(text: str, depth: int) -> list[str] | None:
    """The names of ``a,b,c``; None if it has no comma of its own."""
    cuts, open_ = [-1], 0
    for at, mark in _marks(text, "{},"):
        if mark == "," and open_ == 0:
            cuts.append(at)
        open_ += {"{": 1, "}": -1, ",": 0}[mark]
    if len(cuts) == 1:
        return None
    found: list[str] = []
    for start, end in itertools.pairwise([*cuts, len(text)]):
        found += _pattern(text[start + 1 : end], depth + 1)
        _require_few(len(found))
    return found


def _range(text: str) -> list[str] | None:
    """The names of ``000..127``, ``a..f`` or ``0..9..3``; None if it is none of these."""
    if (match := _NUMBERS.fullmatch(text)) is not None:
        padded = any(one.startswith(("0", "-0")) and one not in ("0", "-0") for one in match.group(1, 2))
        width = max(map(len, match.group(1, 2))) if padded else 0
        numbers = _steps(int(match[1]), int(match[2]), match[3])
        _require_few(len(numbers))
        return [f"{number:0{width}d}" for number in numbers]
    if (match := _LETTERS.fullmatch(text)) is not None:
        return [_ALPHABET[place] for place in _steps(_ALPHABET.index(match[1]), _ALPHABET.index(match[2]), match[3])]
    return None


def _steps(first: int, last: int, step: str | None) -> range:
    by = int(step or 1) or 1
    return range(first, last + 1, by) if first < last else range(first, last - 1, -by)


def _marks(text: str, marks: str) -> list[tuple[int, str]]:
    """Where these characters are, each without a backslash before it."""
    return [(match.start(), match[0]) for match in re.finditer(r"\\.|[{},]", text, re.DOTALL) if match[0] in marks]


def _require_few(count: int) -> None:
    if count > MOST_NAMES:
        raise UsageError(
            say("the braces in the path stand for more than {most} names", most=MOST_NAMES),
            fix=(say("check the range; a pattern such as 'train-*.tar' finds the files that exist"),),
        )
