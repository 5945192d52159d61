"""Score `legroom explain` on failure texts: from public threads (`open`, `aside`), and by hand (`written`, `unseen`, `later`).

    python tests/failure_texts/score.py             # every *.json in this directory
    python tests/failure_texts/score.py FILE …      # those files
    python tests/failure_texts/score.py --write     # and put the table into docs/explain.md

A file is a list of objects: `text`, `label` (the cause that the thread ended with), `decidable` (whether a careful reader
could name that cause from the text alone), `url`, and the notes of the reader who labelled it. `--all` prints every text's verdict.
The texts written by hand have no `url`, and a `kind`: an error that the program survived, a mention of one, or a death;
plain or misleading. `also` are other verdicts that the text allows.

A decidable text is right when the verdict is its label. Of the other texts the right answer is `unknown`; naming
the thread's cause all the same is counted apart, as a guess.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from legroom.records.failure import Evidence, Verdict
from legroom.rescue.find_failures_in_log import facts_of
from legroom.rescue.verdict import classify

HERE = Path(__file__).parent
PAGE = Path(__file__).parents[2] / "docs" / "explain.md"
BEGIN, END = "<!-- scores:begin -->", "<!-- scores:end -->"
SURE = 0.8


@dataclass(frozen=True)
class Scored:
    """One text and the verdict on it."""

    name: str
    label: str
    decidable: bool
    verdict: Verdict
    also: tuple[str, ...] = ()  # other verdicts that the text allows

    @property
    def result(self) -> str:
        """right, unknown, guess or wrong."""
        said = self.verdict.cause
        if self.decidable:
            return "right" if said in (self.label, *self.also) else "unknown" if said == "unknown" else "wrong"
        if said in ("unknown", *self.also):
            return "right"
        return "guess" if said == self.label and not self.sure else "wrong"

    @property
    def sure(self) -> bool:
        """Whether it claims to be sure."""
        return self.verdict.confidence >= SURE

    @property
    def named(self) -> bool:
        """Whether the thread's cause is the verdict or one of the likely ones."""
        return self.label in ("unknown", self.verdict.cause, *(one.cause for one in self.verdict.likely))


def files() -> list[Path]:
    """The files of this directory."""
    return sorted(HERE.glob("*.json"))


def score(path: Path) -> list[Scored]:
    """Every text of that file."""
    rows: list[dict[str, Any]] = json.loads(path.read_text(encoding="utf-8"))
    return [
        Scored(
            row["id"],
            row["label"],
            row["decidable"],
            classify(Evidence(log=facts_of(row["text"].encode()))),
            tuple(row.get("also", ())),
        )
        for row in rows
    ]


def count(scored: Iterable[Scored], *, decidable: bool, result: str, sure: bool | None = None) -> int:
    """How many have that result."""
    return sum(
        one.decidable == decidable and one.result == result and (sure is None or one.sure == sure) for one in scored
    )


def table(parts: dict[str, list[Scored]]) -> str:
    """The scores as Markdown, one row for each part and kind."""
    lines = [
        "| texts | of them | right | `unknown` | guessed right | wrong below 0.8 | wrong at 0.8 or more |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for part, scored in parts.items():
        for decidable, words in ((True, "decidable from the text"), (False, "not decidable")):
            total = sum(one.decidable == decidable for one in scored)
            right = count(scored, decidable=decidable, result="right")
            unknown = str(count(scored, decidable=True, result="unknown")) if decidable else "(is right)"
            guess = "" if decidable else str(count(scored, decidable=False, result="guess"))
            wrong = [count(scored, decidable=decidable, result="wrong", sure=sure) for sure in (False, True)]
            share = f"{right} ({right / total:.0%})" if total else "0"
            lines.append(f"| {part}, {words} | {total} | {share} | {unknown} | {guess} | {wrong[0]} | {wrong[1]} |")
    return "\n".join(lines)


def main() -> None:
    """Print the scores."""
    flags = {word for word in sys.argv[1:] if word.startswith("--")}
    given = [Path(word) for word in sys.argv[1:] if not word.startswith("--")]
    parts = {path.stem: score(path) for path in given or files()}
    for part, scored in parts.items():
        for one in scored:
            if "--all" in flags or one.result == "wrong" or (one.decidable and one.result != "right"):
                likely = " ".join(entry.cause for entry in one.verdict.likely)
                kind = "decidable" if one.decidable else "not decidable"
                print(
                    f"{part}: {one.result}: {one.name}: {one.label} ({kind}), "
                    f"said {one.verdict.cause} {one.verdict.confidence:.2f} {likely}"
                )
        named = sum(one.named for one in scored if not one.decidable)
        print(f"{part}: the thread's cause is among the likely ones in {named} of the texts not decidable")
    text = table(parts)
    print(text)
    if "--write" in flags:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}", encoding="utf-8")


if __name__ == "__main__":
    main()
