"""The files of a translation: .po to write in, .mo to read from.

Covers: reading and writing both, byte for byte repeatable. Does not cover: what is in the source (sources).

No dates and no line numbers are written, so that a changed line in the code is no change here.
"""

from __future__ import annotations

import ast
import struct
from dataclasses import dataclass
from pathlib import Path

HEADER = "Content-Type: text/plain; charset=UTF-8\nContent-Transfer-Encoding: 8bit\nLanguage: {language}\n"


@dataclass
class Entry:
    """One message: its template, its translation (empty: none yet), and what translators noted."""

    template: str
    translation: str = ""
    places: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def same(self) -> bool:
        """Whether a translator said that it reads the same in both languages."""
        return any(note.lstrip("#. ").startswith("same") for note in self.notes)


def read(path: Path) -> dict[str, Entry]:
    """The entries of a .po file by template; an unreadable line is an error that names it."""
    entries: dict[str, Entry] = {}
    parts = {"msgid": "", "msgstr": ""}
    notes: list[str] = []
    field = ""

    def finish() -> None:
        nonlocal field
        if field == "msgstr" and parts["msgid"]:
            if parts["msgid"] in entries:
                raise SystemExit(f"{path}: twice in one file: {parts['msgid']!r}")
            entries[parts["msgid"]] = Entry(parts["msgid"], parts["msgstr"], notes=tuple(notes))
        if field == "msgstr":
            notes.clear()
            field = ""

    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        line = line.strip()
        if line.startswith(("msgid ", "msgstr ")):
            name, _, rest = line.partition(" ")
            if name == "msgid":
                finish()
            field, parts[name], line = name, "", rest
        elif not line or line.startswith("#"):
            finish()
            if line.startswith(("#.", "# ")):
                notes.append(line)
            continue
        try:
            parts[field] += str(ast.literal_eval(line))
        except (SyntaxError, ValueError, KeyError) as problem:
            raise SystemExit(f"{path}:{number}: cannot be read: {line}") from problem
    finish()
    return entries


def po_text(entries: list[Entry], language: str) -> str:
    """A .po file."""
    blocks = [f'msgid ""\nmsgstr {quoted(HEADER.format(language=language))}\n']
    for entry in entries:
        lines = [*entry.notes, *(f"#: {place}" for place in entry.places)]
        if "{" in entry.template:
            lines.append("#, python-brace-format")
        lines += [f"msgid {quoted(entry.template)}", f"msgstr {quoted(entry.translation)}", ""]
        blocks.append("\n".join(lines))
    return "\n".join(blocks)


def quoted(text: str) -> str:
    """A string as .po files write it, on one line."""
    escapes = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\t": "\\t"}
    return '"' + "".join(escapes.get(letter, letter) for letter in text) + '"'


def mo_bytes(entries: list[Entry], language: str) -> bytes:
    """A .mo file as the gettext module reads it: two tables of lengths and offsets, then the strings."""
    pairs = sorted((entry.template.encode(), entry.translation.encode()) for entry in entries)
    pairs.insert(0, (b"", HEADER.format(language=language).encode()))
    ids = b"\0".join(key for key, _ in pairs) + b"\0"
    start = 28 + 16 * len(pairs)
    tables: list[list[int]] = [[], []]
    offsets = [start, start + len(ids)]
    for pair in pairs:
        for side in (0, 1):
            tables[side] += [len(pair[side]), offsets[side]]
            offsets[side] += len(pair[side]) + 1
    head = struct.pack("<7I", 0x950412DE, 0, len(pairs), 28, 28 + 8 * len(pairs), 0, start)
    numbers = struct.pack(f"<{4 * len(pairs)}I", *tables[0], *tables[1])
    return head + numbers + ids + b"\0".join(value for _, value in pairs) + b"\0"
