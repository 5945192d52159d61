"""Keeps the translations beside the code: ``python po/messages.py extract | check | compile``.

extract  brings po/<language>/<layer>.po up to date: new messages come in empty, those that are gone go.
check    fails, with every reason, where a translation is missing, breaks a field or is out of date.
compile  writes src/legroom/locale/<language>/LC_MESSAGES/legroom.mo from all the layers.

Covers: the three commands. Does not cover: what a message is (sources), the files (catalogue).
Needs nothing but Python. How to translate: po/README.md.
"""

from __future__ import annotations

import re
import string
import sys
from collections.abc import Iterator
from pathlib import Path

from catalogue import Entry, mo_bytes, po_text, read
from sources import SOURCE, messages

HERE = Path(__file__).resolve().parent
LANGUAGES = ("zh",)
WIDE_MARKS = "，。：；、（）"  # they bring their own space


def extract(language: str) -> None:
    """Bring the .po files of a language up to date with the source."""
    folder = HERE / language
    folder.mkdir(exist_ok=True)
    old: dict[str, Entry] = {}
    for path in sorted(folder.glob("*.po")):
        # A message may have moved to another layer: its translation moves with it.
        for template, entry in read(path).items():
            if entry.translation or template not in old:
                old[template] = entry
    said = messages()
    for layer in sorted(set(said) | {path.stem for path in folder.glob("*.po")}):
        entries = []
        for template, places in said.get(layer, {}).items():
            was = old.get(template, Entry(template))
            entries.append(Entry(template, was.translation, tuple(places), was.notes))
        path = folder / f"{layer}.po"
        if not entries:
            path.unlink()
            continue
        text = po_text(entries, language)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")
            todo = sum(not entry.translation for entry in entries)
            _print(f"{path.relative_to(HERE.parent)}: {len(entries)} messages, {todo} to translate")


def compile_(language: str) -> None:
    """Write the catalogue that is shipped."""
    path = shipped(language)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(compiled(language))
    _print(f"{path.relative_to(HERE.parent)}: {path.stat().st_size} bytes")


def check(language: str, only: set[str]) -> Iterator[str]:
    """Everything wrong with a language's translations; ``only`` some layers, or all of them."""
    said = messages()
    there = {path.stem: read(path) for path in sorted((HERE / language).glob("*.po"))}
    for layer in sorted(set(said) | set(there)):
        if only and layer not in only:
            continue
        where = f"po/{language}/{layer}.po"
        wanted, has = said.get(layer, {}), there.get(layer, {})
        for template in has.keys() - wanted.keys():
            yield f"{where}: no longer said, run extract: {template!r}"
        for template in wanted:
            entry = has.get(template)
            if entry is None:
                yield f"{where}: not in the file, run extract: {template!r}"
            else:
                yield from (f"{where}: {problem}: {template!r}" for problem in problems(entry))
    path = shipped(language)
    if not only and (not path.exists() or path.read_bytes() != compiled(language)):
        yield f"{path.relative_to(HERE.parent)}: out of date, run compile"


def problems(entry: Entry) -> Iterator[str]:
    """What is wrong with one translation."""
    if not entry.translation:
        yield "not translated"
        return
    try:
        ours, theirs = fields(entry.template), fields(entry.translation)
    except ValueError as problem:
        yield f"braces that do not match ({problem})"
        return
    # A field may be said twice or in another order, but none may be lost, new or formatted otherwise.
    for lost in sorted(set(ours) - set(theirs)):
        yield f"the field {lost} is missing"
    for new in sorted(set(theirs) - set(ours)):
        yield f"the field {new} is not in the original"
    if entry.translation == entry.template and not entry.same and has_words(entry.template):
        yield "the same as the original; note `#. same` above it if that is meant"
    begins = entry.translation[:1]
    if entry.template[:1].isspace() != begins.isspace() and begins not in WIDE_MARKS:
        yield "begins with a space on one side only"
    if entry.template.endswith("\n") != entry.translation.endswith("\n"):
        yield "ends with a new line on one side only"


def fields(template: str) -> list[str]:
    """The fields of a template with their formats: ``{free:>8}``."""
    found = []
    for _, name, form, conversion in string.Formatter().parse(template):
        if name is not None:
            found.append(
                "{" + name + (f"!{conversion}" if conversion else "") + (f":{form}" if form else "") + "}"
            )
    return found


def has_words(template: str) -> bool:
    """Whether there is anything to translate beside fields, numbers and signs."""
    return re.search(r"[A-Za-z]{2}", re.sub(r"\{[^}]*\}|`[^`]*`", " ", template)) is not None


def compiled(language: str) -> bytes:
    """The catalogue of a language as its .po files have it now; what is not translated is left out."""
    merged: dict[str, Entry] = {}
    for path in sorted((HERE / language).glob("*.po")):
        merged.update({key: entry for key, entry in read(path).items() if entry.translation})
    return mo_bytes(list(merged.values()), language)


def shipped(language: str) -> Path:
    """Where the catalogue lies in the package."""
    return SOURCE / "locale" / language / "LC_MESSAGES" / "legroom.mo"


def main(arguments: list[str]) -> int:
    """Run one command; 0 when all is well."""
    command, layers = (arguments[0] if arguments else ""), set(arguments[1:])
    if command not in ("extract", "check", "compile"):
        _print(__doc__)
        return 2
    found = []
    for language in LANGUAGES:
        if command == "extract":
            extract(language)
        elif command == "compile":
            compile_(language)
        else:
            found += list(check(language, layers))
    for problem in found:
        _print(problem)
    return 1 if found else 0


def _print(text: str) -> None:
    sys.stdout.write(text + "\n")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
