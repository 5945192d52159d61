"""What is private goes out of a text, and the same thing gets the same name wherever it stood.

Covers: names that are known to be private (users, hosts, homes, files, the values of secret variables) and things
that look it (patterns.py), in every reading of the text (spelling.py); JSON values and command lines.
Does not cover: knowing the names (known.py). Pure: no file and no environment is looked at here.

First `learn` from everything that will be in the bundle, then redact it: a name found in a path in one part is then
hidden in the middle of a sentence in another.
"""

from __future__ import annotations

import os.path
import re
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from legroom.report.patterns import COMMON, SECRET_NAME, SECRET_OPTION, SECRETS, SHAPES, harmless
from legroom.report.spelling import Reading, readings

SECRET = "<secret>"
_ADDRESSES = frozenset({"ip", "mac"})
_SHORTEST = {"secret": 6, "user": 2, "host": 3, "home": 4, "file": 4}
# An edge is where no letter goes on; for file names no digit either: a1.h5 is not in data1.h5.
_LETTER, _LETTER_DIGIT = r"[^\W\d_]", r"[^\W_]"
_EDGES = {"secret": "", "home": _LETTER_DIGIT, "user": _LETTER, "host": _LETTER_DIGIT, "file": _LETTER_DIGIT}


@dataclass(frozen=True, slots=True)
class Known:
    """Names that are private wherever they stand."""

    users: frozenset[str] = frozenset()
    hosts: frozenset[str] = frozenset()
    homes: frozenset[str] = frozenset()  # directories that do not bear their user's name
    files: frozenset[str] = frozenset()  # names of data files, without their directories
    secrets: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Found:
    start: int
    end: int
    kind: str
    value: str


@dataclass
class Redactor:
    """Hides what is private; remembers what it called whom, and how often it hid what."""

    known: Known = field(default_factory=Known)
    counts: Counter[str] = field(default_factory=Counter)
    _names: dict[tuple[str, str], str] = field(default_factory=dict)
    _learned: dict[str, set[str]] = field(default_factory=dict)
    _literals: dict[str, re.Pattern[str] | None] | None = None

    def learn(self, data: Any) -> None:
        """Take note of users, hosts and files that a text or JSON value names."""
        for text in _strings(data):
            for found in _shaped(list(readings(text)), ("user", "host", "file")):
                bare = found.value.strip()
                if bare.casefold() not in COMMON and len(bare) >= _SHORTEST[found.kind] + 1:
                    self._learned.setdefault(found.kind, set()).add(bare)
        self._literals = None

    def text(self, text: str, *, addresses: bool = True) -> str:
        """The text without what is private; versions like 12.4.5.8 need ``addresses=False``."""
        ways = list(readings(text))
        found = [*self._known_in(ways), *_secrets_in(ways), *_shaped(ways)]
        if not addresses:
            found = [one for one in found if one.kind not in _ADDRESSES]
        parts: list[str] = []
        passed = 0
        for one in _apart(found):
            new = self._name(one)
            parts += (text[passed : one.start], new)
            if new[-1:].isdigit() and text[one.end : one.end + 1].isdigit():
                parts.append("_")  # user-1 and the 2 of bob2 are not user-12
            passed = one.end
        return "".join((*parts, text[passed:]))

    def value(self, data: Any, *, addresses: bool = True) -> Any:
        """A JSON value without what is private, in its names as in its values."""
        if isinstance(data, str):
            return self.text(data, addresses=addresses)
        if isinstance(data, dict):
            return {
                self.text(str(name), addresses=addresses): self._secret(item)
                if isinstance(item, str) and SECRET_NAME.fullmatch(str(name)) and not harmless("secret", item)
                else self.value(item, addresses=addresses)
                for name, item in data.items()
            }
        if isinstance(data, list | tuple):
            before: list[Any] = [None, *data]
            return [
                self._secret(item)
                if isinstance(last, str) and isinstance(item, str) and SECRET_OPTION.fullmatch(last)
                else self.value(item, addresses=addresses)
                for last, item in zip(before, data, strict=False)
            ]
        return data

    def _secret(self, _value: str) -> str:
        self.counts["secret"] += 1
        return SECRET

    def _known_in(self, ways: Sequence[Reading]) -> Iterator[_Found]:
        if self._literals is None:
            named = {
                "user": self.known.users, "host": self.known.hosts, "home": self.known.homes,
                "file": self.known.files, "secret": self.known.secrets,
            }  # fmt: skip
            self._literals = {
                kind: _any_of(kind, names | self._learned.get(kind, set())) for kind, names in named.items()
            }
        for reading in ways:
            for kind, pattern in self._literals.items():
                if pattern is not None:
                    for match in pattern.finditer(reading.text):
                        yield _Found(*reading.span(*match.span()), kind, match[0])

    def _name(self, found: _Found) -> str:
        self.counts[found.kind] += 1
        if found.kind == "secret":
            return SECRET
        key = (found.kind, _canonical(found.value))
        if key not in self._names:
            number = 1 + sum(kind == found.kind for kind, _ in self._names)
            self._names[key] = f"{found.kind}-{number}"
            if found.kind == "file":
                self._names[key] += os.path.splitext(key[1])[1]
            elif found.kind == "home":
                self._names[key] = "/" + self._names[key]
        return self._names[key]


def _secrets_in(ways: Sequence[Reading]) -> Iterator[_Found]:
    for reading in ways:
        for pattern in SECRETS:
            for match in pattern.finditer(reading.text):
                group = "it" if "it" in pattern.groupindex else 0
                counted = match.groupdict().get("token") is not None and harmless("token", match[group])
                if not counted and not harmless("secret", match[group]):
                    yield _Found(*reading.span(*match.span(group)), "secret", match[group])


def _shaped(ways: Sequence[Reading], kinds: Sequence[str] | None = None) -> Iterator[_Found]:
    for reading in ways:
        for kind, pattern in SHAPES:
            if kinds is None or kind in kinds:
                for match in pattern.finditer(reading.text):
                    group = "it" if "it" in pattern.groupindex else 0
                    if not harmless(kind, match[group]):
                        yield _Found(*reading.span(*match.span(group)), kind, match[group])


def _apart(found: Iterable[_Found]) -> list[_Found]:
    """What was found, in order; what overlaps goes together, a secret before anything, then the longest."""
    apart: list[_Found] = []
    for one in sorted(found, key=lambda one: (one.start, -one.end)):
        if one.start == one.end:
            continue
        last = apart[-1] if apart else None
        if last is None or one.start >= last.end:
            apart.append(one)
            continue
        best = max(last, one, key=lambda each: (each.kind == "secret", each.end - each.start))
        apart[-1] = _Found(last.start, max(last.end, one.end), best.kind, best.value)
    return apart


def _any_of(kind: str, names: Iterable[str]) -> re.Pattern[str] | None:
    """Any of the names in any case; None where there is none worth looking for."""
    spelt: set[str] = set()
    for name in names:
        if len(name) < _SHORTEST[kind] or (kind in ("user", "host") and name.casefold() in COMMON):
            continue
        cases = (name, name.upper(), name.lower(), name.casefold(), name.title())
        spelt.update(unicodedata.normalize(form, case) for form in ("NFC", "NFD") for case in cases)
        spelt.update(cases)
    if not spelt:
        return None
    edge = _EDGES[kind]
    names_in_turn = "|".join(re.escape(name) for name in sorted(spelt, key=lambda name: (-len(name), name)))
    before, after = (f"(?<!{edge})", f"(?!{edge})") if edge else ("", "")
    return re.compile(f"{before}(?:{names_in_turn}){after}", re.IGNORECASE)


def _canonical(value: str) -> str:
    """What every spelling of a name has in common."""
    plainest = list(readings(value))[-1].text
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", plainest).upper().casefold())


def _strings(data: Any) -> Iterator[str]:
    if isinstance(data, str):
        yield data
    elif isinstance(data, dict):
        for name, item in data.items():
            yield str(name)
            yield from _strings(item)
    elif isinstance(data, list | tuple):
        for item in data:
            yield from _strings(item)
