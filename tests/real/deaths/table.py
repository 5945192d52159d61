"""Every death of the corpus, its true cause, and the verdict on it: live in four places, and from the log alone.

    python tests/real/deaths/table.py            # print the table
    python tests/real/deaths/table.py --write    # and put it into docs/deaths.md
    python tests/real/deaths/table.py --only oom_tee,podman   # some cases, some places
    python tests/real/deaths/table.py --only podman --keep a.json   # in parts: keep what was said
    python tests/real/deaths/table.py --from a.json,b.json --write  # and put the parts together

Needs root for the rigs. Covers: running the corpus and printing. Does not cover: the cases (corpus.py).
"""

from __future__ import annotations

import json
import platform
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import corpus

PAGE = Path(__file__).parents[3] / "docs" / "deaths.md"
BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"
Said = dict[str, Any]
Results = dict[str, dict[str, Said]]  # by case, by place; "log": from what it wrote


def table(judged: list[tuple[corpus.Case, dict[str, Said], Said]], places: list[str]) -> str:
    """The table and its sums, as Markdown."""
    lines = [
        f"| failure | true cause | {' | '.join(corpus.PLACES[place] for place in places)} | from the log alone |",
        "| --- " * (len(places) + 3) + "|",
    ]
    for case, live, log in judged:
        cells = [_cell(case, live[place]) if place in live else "" for place in places]
        alone = "" if case.exit == 0 else _cell(case, log)
        lines.append(f"| {case.what} | `{case.truth}` | {' | '.join(cells)} | {alone} |")
    lines.append("")
    for place in places:
        said = [(case, live[place]) for case, live, _ in judged if place in live]
        if said:
            lines.append(f"- {corpus.PLACES[place]}: {_score(said)}")
    logs = [(case, log) for case, _, log in judged if case.exit != 0]
    told = [(case, log) for case, log in logs if not case.silent]
    lines.append(f"- from the log alone: {_score(logs)}; of those whose log tells the cause: {_score(told)}")
    where = f"Linux {platform.release()}, Python {platform.python_version()}"
    lines += ["", f"Run {time.strftime('%Y-%m-%d')} on {where}."]
    return "\n".join(lines)


def _score(said: list[tuple[corpus.Case, Said]]) -> str:
    right = sum(case.right(one) for case, one in said)
    unsure = sum(not case.right(one) and _unsure(one) for case, one in said)
    wrong = len(said) - right - unsure
    return f"**{right} of {len(said)}** right, {unsure} unsure, {wrong} wrong"


def _cell(case: corpus.Case, said: Said) -> str:
    text = f"`{said['verdict']}` {said['confidence']:.2f}" if said["verdict"] else "`none`"
    if case.right(said):
        return text
    return f"*{text}*" if _unsure(said) else f"**{text}**"


def _unsure(said: Said) -> bool:
    return said["verdict"] == "unknown" or (said["verdict"] is not None and said["confidence"] < corpus.SURE)


def main() -> None:
    arguments = sys.argv[1:]
    only, parts = _words(arguments, "--only"), _words(arguments, "--from")
    places = [place for place in corpus.PLACES if place in only] or list(corpus.PLACES)
    wanted = set(only) - set(places)
    cases = [case for case in corpus.cases() if not wanted or case.name in wanted]
    said: Results = {}
    for part in parts:
        for name, row in json.loads(Path(part).read_text()).items():
            said.setdefault(name, {}).update(row)
    if not parts:
        said = _run(cases, places, _words(arguments, "--keep"))
    judged = []
    for case in cases:
        row = said.get(case.name, {})
        if row or case.log:
            live = {place: row[place] for place in places if place in row}
            judged.append((case, live, row.get("log") or corpus.judge(case).log))
    text = table(judged, places)
    print(text)
    if "--write" in arguments:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


def _run(cases: list[corpus.Case], places: list[str], keep: list[str]) -> Results:
    said: Results = {}
    for case in cases:
        for place in [] if case.log else [place for place in places if place in case.places]:
            began = time.monotonic()
            one = corpus.judge(case, place)
            assert one.live is not None
            row = said.setdefault(case.name, {})
            row[place] = {name: one.live[name] for name in ("verdict", "confidence", "evidence", "exit")}
            if place == places[0]:
                row["log"] = one.log
            told = f"{one.live['verdict']} {one.live['confidence']} exit {one.live['exit']}"
            mark = "" if case.right(one.live) else f"   <-- {case.truth}: {one.live['evidence']}"
            took = time.monotonic() - began
            print(f"{case.name} {place} {took:.0f} s: {told}{mark}", file=sys.stderr, flush=True)
            for path in keep:
                Path(path).write_text(json.dumps(said))
    return said


def _words(arguments: list[str], option: str) -> list[str]:
    return arguments[arguments.index(option) + 1].split(",") if option in arguments else []


if __name__ == "__main__":
    main()
