"""Keeps the translations beside the code, by Babel: ``python po/messages.py update | check | compile``.

update   brings po/<language>.po up to date: new messages come in empty, those that are gone go.
check    fails, with every reason, where a translation breaks a field or is out of date. A message that is not
         translated yet is shown in English, and is counted only.
compile  writes src/legroom/locale/<language>/LC_MESSAGES/legroom.mo.

How to translate: po/README.md.
"""

from __future__ import annotations

import gettext
import io
import re
import string
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from babel.messages.catalog import Catalog, Message
from babel.messages.extract import extract_from_dir
from babel.messages.mofile import write_mo
from babel.messages.pofile import read_po, write_po
from extract import extract_python

HERE = Path(__file__).resolve().parent
SOURCE = HERE.parent / "src" / "legroom"
LANGUAGES = ("zh",)
METHODS: list[tuple[str, Any]] = [("**.py", extract_python)]  # babel's types allow names of functions alone
WIDE_MARKS = "，。：；、（）"  # they bring their own space


def template() -> Catalog:
    """Every message of the source."""
    found = Catalog()
    for _, _, message, _, _ in extract_from_dir(SOURCE, METHODS):
        found.add(message)
    return found


def stored(language: str) -> Catalog:
    """The translations as they are in the .po file."""
    with (HERE / f"{language}.po").open("rb") as file:
        return read_po(file, locale=language)


def entries(catalog: Catalog) -> dict[str, Message]:
    """The messages of a catalogue by their English text, without its header."""
    return {str(message.id): message for message in catalog if message.id}


def update(language: str) -> None:
    """Bring the .po file up to date with the source."""
    old, catalog = entries(stored(language)), _empty(language)
    for text in entries(template()):
        was = old.get(text, Message(text))
        catalog.add(text, was.string, user_comments=was.user_comments)
    for message in catalog:
        message.flags.discard("python-format")  # a % is part of a sentence or of {share:.0%}
    buffer = io.BytesIO()
    write_po(buffer, catalog, width=0, no_location=True, sort_output=True)
    (HERE / f"{language}.po").write_bytes(buffer.getvalue())
    _print(f"po/{language}.po: {len(catalog)} messages, {_untranslated(catalog)} not translated")


def compile_(language: str) -> None:
    """Write the catalogue that is shipped."""
    catalog = _empty(language)
    for text, message in entries(stored(language)).items():
        catalog.add(text, message.string)
    path = shipped(language)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("wb") as file:
        write_mo(file, catalog)
    _print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size} bytes")


def check(language: str) -> Iterator[str]:
    """Everything wrong with the translations of a language."""
    catalog, said = stored(language), entries(template())
    translated = {text: str(message.string) for text, message in entries(catalog).items() if message.string}
    for text, message in entries(catalog).items():
        if text not in said:
            yield f"no longer in the source, run make messages: {text!r}"
        yield from (f"{problem}: {text!r}" for problem in problems(message))
    try:
        with shipped(language).open("rb") as file:
            compiled = {key: value for key, value in vars(gettext.GNUTranslations(file))["_catalog"].items() if key}
    except FileNotFoundError:
        compiled = {}
    if compiled != translated:
        yield f"{shipped(language).relative_to(HERE.parent)}: out of date, run make messages"
    missing = len(said.keys() - translated.keys())
    _print(f"{language}: {missing} of {len(said)} messages are not translated")


def problems(message: Message) -> Iterator[str]:
    """What is wrong with one translation; nothing where there is none yet."""
    english, translation = str(message.id), str(message.string or "")
    if not translation:
        return
    try:
        ours, theirs = fields(english), fields(translation)
    except ValueError as problem:
        yield f"braces that do not match ({problem})"
        return
    # A field may be there twice or in another order, but none may be lost, new or formatted otherwise.
    for lost in sorted(ours - theirs):
        yield f"the field {lost} is missing"
    for new in sorted(theirs - ours):
        yield f"the field {new} is not in the original"
    if translation == english and "same" not in message.user_comments and has_words(english):
        yield "the same as the original; note `# same` above it if that is meant"
    begins = translation[:1]
    if english[:1].isspace() != begins.isspace() and begins not in WIDE_MARKS:
        yield "begins with a space on one side only"
    if english.endswith("\n") != translation.endswith("\n"):
        yield "ends with a new line on one side only"


def fields(text: str) -> set[str]:
    """The fields of a template with their formats: ``{free:>8}``."""
    parts = string.Formatter().parse(text)
    return {
        "{" + name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
        for _, name, form, conversion in parts
        if name is not None
    }


def has_words(text: str) -> bool:
    """Whether there is anything to translate beside fields, numbers and signs."""
    return re.search(r"[A-Za-z]{2}", re.sub(r"\{[^}]*\}|`[^`]*`", " ", text)) is not None


def shipped(language: str) -> Path:
    """Where the catalogue lies in the package."""
    return SOURCE / "locale" / language / "LC_MESSAGES" / "legroom.mo"


def _empty(language: str) -> Catalog:
    # No date of today: the same messages are the same file.
    always = datetime(2026, 1, 1, tzinfo=UTC)
    names = {"project": "Legroom", "version": "0", "last_translator": "Legroom", "language_team": language}
    return Catalog(
        language, header_comment="# How to translate: po/README.md", msgid_bugs_address="legroom",
        creation_date=always, revision_date=always, fuzzy=False, **names,
    )  # fmt: skip


def _untranslated(catalog: Catalog) -> int:
    return sum(not message.string for message in entries(catalog).values())


def main(arguments: list[str]) -> int:
    """Run one command; 0 when all is well."""
    if arguments not in (["update"], ["check"], ["compile"]):
        _print(__doc__)
        return 2
    found = []
    for language in LANGUAGES:
        if arguments == ["update"]:
            update(language)
        elif arguments == ["compile"]:
            compile_(language)
        else:
            found += list(check(language))
    for problem in found:
        _print(problem)
    return 1 if found else 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
