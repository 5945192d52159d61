"""Messages for users: choose the language, look a template up in its catalogue, fill in its fields.

Messages are templates with named fields, never f-strings, so that they can be found in a catalogue (locale/, made by
po/messages.py). A template without translation is shown in English. Codes, JSON keys, units and commands are the same
in every language.

Also measures, pads, cuts and wraps text by terminal columns: a Chinese character takes two.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext

ENGLISH = "en"
LANGUAGES = (ENGLISH, "zh")
VARIABLE = "LEGROOM_LANG"

# Characters that a terminal interprets (control characters, right-to-left overrides, line separators), and lone
# surrogates, which no encoding can represent.
CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
# Fields that contain a name, never a sentence.
_ONE_LINE = frozenset(
    ("command", "file", "folder", "key", "name", "path", "pattern", "store", "target", "what", "where")
)

# Looks a template up; None until the first message, so that importing Legroom reads no catalogue.
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
    """A name, path or value from outside, on one line, with control characters escaped as in JSON."""
    return harmless(str(name)).replace("\t", r"\u0009").replace("\n", r"\u000a")


def harmless(text: str) -> str:
    """Text of several lines with control characters escaped."""
    return CONTROL.sub(_escape, text)


def _escape(letter: re.Match[str]) -> str:
    return f"\\u{ord(letter[0]):04x}"


class _Guarded(str):
    """Text that is formatted with control characters escaped; repr escapes by itself."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return harmless(super().__format__(spec))


class _GuardedName(str):
    """A path, formatted on one line."""

    __slots__ = ()

    def __format__(self, spec: str) -> str:
        return shown(super().__format__(spec))


def _guarded(field: str, value: object) -> object:
    """Field values: names in files, paths and output of other programs may contain anything."""
    if isinstance(value, (str, os.PathLike)):
        if field in _ONE_LINE or not isinstance(value, str):
            return _GuardedName(value) if shown(value) != str(value) else value
        return _Guarded(value) if CONTROL.search(value) else value
    return _Guarded(value) if isinstance(value, Exception) and CONTROL.search(str(value)) else value


def phrase(template: str) -> str:
    """Mark a template for the catalogue where it is stored in a table or passed as an argument, to be said later."""
    return template


def either(english: str, chinese: str) -> str:
    """One of two texts, by the language of this process: for scripts without a catalogue, such as the examples."""
    return chinese if language() == "zh" else english


def counted(count: int, one: str, many: str) -> str:
    """A number with its noun: ``1 GPU``, ``2 GPUs``. Both are templates of ``count``, marked by ``phrase``."""
    return say(one if count == 1 else many, count=count)


# Nouns for `counted`.
RANKS = phrase("{count} rank"), phrase("{count} ranks")
SAMPLES = phrase("{count} sample"), phrase("{count} samples")
WORKERS = phrase("{count} worker"), phrase("{count} workers")


def listed(items: Iterable[str]) -> str:
    """Names or figures in a list: ``a, b, c``; not for text to type, since the comma depends on the language."""
    return say(", ").join(items)


def joined(sentences: Iterable[str]) -> str:
    """Sentences on one line: ``one; another``."""
    return say("; ").join(sentences)


def _holding_forks_back() -> AbstractContextManager[object]:
    """The lock of lazy_and_optional_imports.py, which imports this module; nothing where that is not imported."""
    lock: AbstractContextManager[object] | None
    lock = getattr(sys.modules.get("legroom.system.lazy_and_optional_imports"), "import_lock", None)
    return nullcontext() if lock is None else lock


def speak(language: str) -> None:
    """Switch to this language, one of LANGUAGES."""
    global _look_up, _language
    if language not in LANGUAGES:
        raise ValueError(language)
    _language = language
    if language == ENGLISH:
        _look_up = phrase
        return
    with _holding_forks_back():
        from gettext import translation  # not needed for English

    folder = os.path.join(os.path.dirname(__file__), "locale")
    _look_up = translation("legroom", folder, [language], fallback=True).gettext


def language() -> str:
    """The language of this process."""
    if _look_up is None:
        _begin()
    return _language


def chosen(environment: Mapping[str, str]) -> str:
    """The language an environment selects: LEGROOM_LANG, then gettext's variables, then English.

    As in gettext, the first of LC_ALL, LC_MESSAGES and LANG that is set names the locale; C and POSIX mean
    English whatever else is set, and in any other locale LANGUAGE, a list, goes before it.
    """
    own = known(environment.get(VARIABLE, ""))
    if own:
        return own
    locale = next((environment[name] for name in ("LC_ALL", "LC_MESSAGES", "LANG") if environment.get(name)), "C")
    if locale.split(".")[0] in ("C", "POSIX"):
        return ENGLISH
    wanted = [*environment.get("LANGUAGE", "").split(":"), locale]
    return next((name for name in map(known, wanted) if name), ENGLISH)


def known(name: str) -> str | None:
    """The language of a name, if it is supported: ``zh_CN.UTF-8``, ``zh-Hans``, ``en``, ``C`` …"""
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


# Punctuation that must not begin a line, and punctuation that must not end one.
_CLOSING = "，。：；、！？）》」』】〉％…—”’)]},.;:!?"
_OPENING = "（《「『【〈“‘"
_SPACE = re.compile(r"(\s+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


def cells(text: str) -> int:
    """The width of a text in columns, without colour codes."""
    if text.isascii() and "\x1b" not in text:
        return len(text)
    return sum(_cells(letter) for letter in _COLOUR.sub("", text))


def _cells(letter: str) -> int:
    with _holding_forks_back():
        from unicodedata import combining, east_asian_width  # not needed for ASCII

    if combining(letter):
        return 0
    return 2 if east_asian_width(letter) in "WF" else 1


def left(text: str, columns: int) -> str:
    """The text padded to that width, left-aligned."""
    return text + " " * (columns - cells(text))


def right(text: str, columns: int) -> str:
    """The text padded to that width, right-aligned."""
    return " " * (columns - cells(text)) + text


def cut(line: str, columns: int) -> str:
    """One line, cut to that width with an ellipsis."""
    if cells(line) <= columns:
        return line
    room, kept = columns - 1, ""
    for letter in line:
        room -= _cells(letter)
        if room < 0:
            break
        kept += letter
    return kept + "…"


def cut_front(line: str, columns: int) -> str:
    """One line, cut at its beginning to that width: the end of a path says which file it is."""
    if cells(line) <= columns:
        return line
    room, first = columns - 1, len(line)
    while first and (room := room - _cells(line[first - 1])) >= 0:
        first -= 1
    return "…" + line[first:]


def fill(text: str, columns: int, first: str, rest: str) -> str:
    """The text wrapped; commands are never broken at a hyphen or inside a word, Chinese between any two characters."""
    if len(text) == cells(text) and len(first) == cells(first):
        with _holding_forks_back():
            import textwrap  # only the command line wraps

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
    """Unbreakable parts: words, spaces, and single wide characters with their punctuation."""
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


def step_label(step: str) -> str:
    """The label of one step of a fix; a step that verifies begins with its own, ``check:``."""
    return "  " if step.startswith(say("check:")) else say("  do:  ")


def step_indent() -> str:
    """The indentation of further lines of a step."""
    return " " * cells(say("  do:  "))
