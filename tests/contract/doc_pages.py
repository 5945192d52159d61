"""The pages people read, as blocks of code.

Covers: which pages there are, their fenced blocks, and the marks above a block. Does not cover: running them
(doc_runner.py, doc_shell.py).

A block is run as it stands. What cannot be seen from the block itself stands in a comment right above its fence, which
no reader sees: ``<!-- run: after; given=dataset -->``

    after            python: goes on where the block before it ended
    given=A,B        python: these names are there (doc_folder.GIVEN says as what)
    elsewhere=cpu    python: without a card, "cuda" is taken to be "cpu"
    needs=cuda       run only with a card
    file=NAME        is the content of NAME, for the blocks that follow
    exit=any         sh: whether it answers yes (0) or no (1) depends on the machine
    no: REASON       not run, because REASON; python and sh are still looked at
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

REPO = Path(__file__).parents[2]
LANGUAGES = {"python", "py", "sh", "console", "text", "json", "yaml", "toml"}  # py: a signature, not a program
# What may be said of a block, and as what; None: anything, "": nothing.
MARKS = {"after": "", "given": None, "elsewhere": "cpu", "needs": "cuda", "file": None, "exit": "any"}
_MARK = re.compile(r"^\s*<!-- run: (?P<marks>.*?) -->\s*$")
_FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\S*)\s*$")


class BadMark(ValueError):
    """A mark, a language or a fence that is not known."""


@dataclass(frozen=True)
class Block:
    """One fenced block; ``line`` is where its text begins, counted from 1."""

    page: str
    line: int
    language: str
    text: str
    marks: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


def pages() -> list[str]:
    """Every page for people, by its path in the repository."""
    found = [*REPO.glob("README*.md"), *REPO.glob("docs/**/*.md"), *REPO.glob("examples/*/README*.md")]
    return sorted(str(path.relative_to(REPO)) for path in found)


def original(page: str) -> str | None:
    """The page that this one is a translation of: README.md for README.zh-CN.md."""
    before = re.sub(r"\.[a-z]{2}(-[A-Z]{2})?\.md$", ".md", page)
    return before if before != page else None


def blocks_of(page: str) -> list[Block]:
    """The blocks of a page, in order."""
    return parse(page, (REPO / page).read_text(encoding="utf-8"))


def parse(page: str, text: str) -> list[Block]:
    """The fenced blocks of a text, with the marks above them."""
    found: list[Block] = []
    marks: dict[str, str] = {}
    lines = iter(enumerate(text.splitlines(), 1))
    for number, line in lines:
        if mark := _MARK.match(line):
            marks = read_marks(f"{page}:{number}", mark["marks"])
            continue
        if fence := _FENCE.match(line):
            body = _body(f"{page}:{number}", lines, len(fence["indent"]))
            if fence["language"] not in LANGUAGES:
                raise BadMark(f"{page}:{number}: a block of {fence['language'] or 'no language'}: name one")
            found.append(Block(page, number + 1, fence["language"], body, marks))
        elif marks:
            raise BadMark(f"{page}:{number}: a mark stands right above its block, and nothing between them")
        marks = {}
    return found


def _body(where: str, lines: object, indent: int) -> str:
    kept = []
    for _, line in lines:  # type: ignore[attr-defined]
        if line.strip() == "```":
            return "".join(f"{one[indent:]}\n" for one in kept)
        kept.append(line)
    raise BadMark(f"{where}: a block without an end")


def read_marks(where: str, text: str) -> dict[str, str]:
    """The marks of one comment: ``after``, ``needs=cuda``, ``no: why``."""
    if text.startswith("no:"):
        if not text[3:].strip():
            raise BadMark(f"{where}: a block is left out for a reason, and there is none")
        return {"no": text[3:].strip()}
    marks = {}
    for one in text.split(";"):
        name, _, value = one.strip().partition("=")
        if name not in MARKS or (not value if MARKS[name] is None else value != MARKS[name]):
            raise BadMark(f"{where}: the mark {one.strip()!r} means nothing")
        marks[name] = value
    return marks
