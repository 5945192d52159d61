"""Sentences for people: a template and its numbers become text here and nowhere else.

Covers: choosing the language, looking a template up in its catalogue, filling it. Does not cover:
choosing what to say (budget, errors) or laying it out (cli).

Messages are templates with named fields, never f-strings: a template can be found in a catalogue
(locale/, made by po/messages.py), and one that is not there is said in English. Codes, the keys of
JSON, units and commands to type are the same in every language.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
VARIABLE = "LEGROOM_LANG"

# What a terminal obeys instead of showing it (control characters, right-to-left overrides, separators of lines), and
# halves of characters that no encoding can carry.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Fields of templates that hold a name and never a sentence.
_ONE_LINE = frozenset(
    ("command", "file", "folder", "key", "name", "path", "pattern", "store", "target", "what", "where")
)
_IN_NAME = re.compile(f"[\t\n]|{CONTROL.pattern}")

# What looks a template up; None until something is said, so that importing Legroom reads nothing.
_look_up: Callable[[str], str] | None = None
_language = ENGLISH


def say(template: str, **values: object) -> str:
    """Fill a message template, in the language of this process: ``say("{free} left", free="3 MB")``."""
    look_up = _look_up or _begin()
    text = look_up(template) if template else template  # gettext's empty message is the catalogue's header
    if not values:
        return text
    return text.format(**{field: _guarded(field, value) for field, value in values.items()})


def shown(name: object) -> str:
    """A name, path or value that others chose, on one line and as a terminal shall show it: escapes as in JSON."""
    return _IN_NAME.sub(_escape, str(name))


def harmless(text: str) -> str:
    """Text of several lines in which nothing is left that a terminal obeys."""
    return CONTROL.sub(_escape, text)


def _escape(letter: re.Match[str]) -> str:
    return f"\\u{ord(letter[0]):04x}"


class _Guarded(str):
    """A text that is shown harmless; its repr escapes by itself."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return harmless(super().__format__(spec))


class _GuardedName(str):
    """A path, which is one line whatever it holds."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return shown(super().__format__(spec))


def _guarded(field: str, value: object) -> object:
    """What fills a template: names in files, paths and other programs' words may hold anything."""
    if isinstance(value, (str, os.PathLike)):
        if field in _ONE_LINE or not isinstance(value, str):
            return _GuardedName(value) if _IN_NAME.search(str(value)) else value
        return _Guarded(value) if CONTROL.search(value) else value
    return _Guarded(value) if isinstance(value, Exception) and CONTROL.search(str(value)) else value


def phrase(template: str) -> str:
    """A template that is said later, as it is: marks it for the catalogue where a table or an argument holds it."""
    return template


def either(english: str, chinese: str) -> str:
    """One of two texts, by the language of this process: for scripts that have no catalogue, as the examples."""
    return chinese if language() == "zh" else english


def counted(count: int, one: str, many: str) -> str:
    """A number with its noun: ``1 GPU``, ``2 GPUs``. Both are templates of ``count``, marked by ``phrase``."""
    return say(one if count == 1 else many, count=count)


def listed(items: Iterable[str]) -> str:
    """Names or figures in a row: ``a, b, c``; not for what a person types, where the comma belongs to a language."""
    return say(", ").join(items)


def joined(sentences: Iterable[str]) -> str:
    """Sentences on one line: ``one; another``."""
    return say("; ").join(sentences)


def speak(language: str) -> None:
    """Say everything from now on in this language, one of LANGUAGES."""
    global _look_up, _language
    if language not in LANGUAGES:
        raise ValueError(language)
    _language = language
    if language == ENGLISH:
        _look_up = phrase
        return
    from gettext import translation  # English does without

    folder = os.path.join(os.path.dirname(__file__), "locale")
    _look_up = translation("legroom", folder, [language], fallback=True).gettext


def language() -> str:
    """The language of this process."""
    if _look_up is None:
        _begin()
    return _language


def chosen(environment: Mapping[str, str]) -> str:
    """The language an environment asks for: LEGROOM_LANG, then what gettext goes by, then English.

    As in gettext, the first of LC_ALL, LC_MESSAGES and LANG that is set names the locale; C and POSIX mean
    English whatever else is set, and in any other locale LANGUAGE, a list, goes before it.
    """
    own = known(environment.get(VARIABLE, ""))
    if own:
        return own
    locale = next(
        (environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "C"
    )
    if locale.split(".")[0] in ("C", "POSIX"):
        return ENGLISH
    wanted = [*environment.get("LANGUAGE", "").split(":"), locale]
    return next((name for name in map(known, wanted) if name), ENGLISH)


def known(name: str) -> str | None:
    """The language a name stands for, where Legroom speaks it: ``zh_CN.UTF-8``, ``zh-Hans``, ``en``, ``C`` …"""
    for mark in ".@-_":
        name = name.partition(mark)[0]
    name = name.lower()
    if name in ("c", "posix"):
        return ENGLISH
    return name if name in LANGUAGES else None


def _begin() -> Callable[[str], str]:
    speak(chosen(os.environ))
    assert _look_up is not None
    return _look_up
