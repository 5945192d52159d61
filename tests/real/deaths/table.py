"""Every death of the corpus, its true cause, and what was said of it: live, and from the log alone.

    python tests/real/deaths/table.py            # print the table
    python tests/real/deaths/table.py --write    # and put it into docs/deaths.md

Needs root for the rigs. Covers: running the corpus and printing. Does not cover: the cases (corpus.py).
"""

from __future__ import annotations

import platform
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import corpus

PAGE = Path(__file__).parents[3] / "docs" / "deaths.md"
BEGIN, END = "<!-- result:begin -->", "<!-- result:end -->"


def table(judged: list[corpus.Judged]) -> str:
    """The table and its sums, as Markdown."""
    lines = ["| death | truth | live | from the log alone |", "| --- | --- | --- | --- |"]
    for one in judged:
        live = "(only a log)" if one.live is None else _cell(one.live, one.case.truth)
        lines.append(f"| {one.case.what} | `{one.case.truth}` | {live} | {_cell(one.log, one.case.truth)} |")
    lived = [one for one in judged if one.live is not None]
    right_live = sum(one.live["verdict"] == one.case.truth for one in lived if one.live)
    right_log = sum(one.log["verdict"] == one.case.truth for one in judged)
    real = [one for one in judged if not one.case.written]
    right_real = sum(one.log["verdict"] == one.case.truth for one in real)
    where = f"Linux {platform.release()}, Python {platform.python_version()}"
    lines += [
        "",
        f"Live: **{right_live} of {len(lived)}** right. From the log alone: **{right_log} of {len(judged)}** "
        f"({right_log / len(judged):.0%}); without the written logs {right_real} of {len(real)} "
        f"({right_real / len(real):.0%}). Run {time.strftime('%Y-%m-%d')} on {where}.",
    ]
    return "\n".join(lines)


def _cell(said: dict[str, object], truth: str) -> str:
    text = f"`{said['verdict']}` {said['confidence']:.2f}"
    return text if said["verdict"] == truth else f"**{text}**"


def main() -> None:
    judged = []
    for case in corpus.cases():
        print(f"{case.name} …", file=sys.stderr, flush=True)
        judged.append(corpus.judge(case))
    text = table(judged)
    print(text)
    if "--write" in sys.argv[1:]:
        before, _, rest = PAGE.read_text().partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
