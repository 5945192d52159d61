"""docs/measured.md: every measurement of this project, where its figures are, and the command that repeats it.

The benchmarks' rows come from bench/results/ and from the sections that tables.py makes of them; tables.py writes the
page.
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping
from pathlib import Path

HERE = Path(__file__).parent
RESULTS, REPO = HERE / "results", HERE.parent
PAGE = REPO / "docs" / "measured.md"

INTRO = """# What was measured

Every measurement of this project, the page with its figures, and the command that repeats it. Run the commands in a
clone after `make setup`; `python` is `.venv/bin/python` there. `make bench` runs most benchmarks, and `make gpu` those
that need a GPU. `bench/README.md` describes each. `bench/tables.py` writes this page.

## Benchmarks

*Targets*: how many of the goals that were set before the measurement were reached. Versions of packages, the load of
the machine and notes on each run are with the figures.
"""
OTHERS = """
## Diagnoses, predictions and claims

The machine and the date are on each page.

| measured | repeat with | needs |
| --- | --- | --- |"""
# What was measured, its page, its command, what it needs.
OTHER_ROWS = (
    (
        "How often `legroom run` diagnoses a real failure correctly",
        "deaths.md",
        "python tests/real/deaths/table.py",
        "root",
    ),
    (
        "How often `legroom explain` is right about texts from public threads",
        "explain.md#how-often-it-is-right",
        "python tests/failure_texts/score.py",
        "",
    ),
    (
        "How often `legroom check` predicts correctly",
        "check.md#how-often-it-is-right",
        "python tests/real/check_rig.py --seed 777004 --count 200 --jobs 2 --out cases.jsonl",
        "root, a disposable machine",
    ),
    (
        "How often `legroom leak` names the line",
        "leak.md#how-often-it-is-right",
        "",
        "measured once; the scripts are not in the repository",
    ),
    ("Claims about memory: {held} of {claims} hold", "evidence/index.md", "make evidence", "root; a GPU for one"),
    (
        "`legroom.DataLoader` with torch's own tests",
        "dataloader.md#compatibility-with-torchs-class",
        "make test-torch-suite TORCH_TESTS=path/to/pytorch/test",
        "torch's source",
    ),
    (
        "The DataLoader with the oldest torch",
        "decisions/0017-oldest-torch.md",
        "make test-torch",
        "5 GB of disk: torch with CUDA",
    ),
    ("The wheel with each Python", "support.md#python-versions", "make test-pythons", ""),
    ("Oldest and newest packages", "support.md#package-versions", "make test-versions", "3 GB of disk"),
    (
        "The readers compared with the libraries of their formats",
        "support.md#libraries-of-the-formats",
        "make test-libraries",
        "3 GB of disk",
    ),
    ("The demo's figures, on your machine", "demo.md", "make demo", ""),
)

# What is not `python bench/NAME.py`.
COMMANDS = {
    "cache-xeon-2": "taskset -c 0,1 python bench/cache.py",
    "cache-xeon-16": "python bench/cache.py",
    "nodes16": "python bench/nodes.py --name nodes16",
    "peers": ".venv-peers/bin/python bench/peers.py",
    "tune-legroom": "python bench/tune.py --loader legroom",
    "tune-torch": "python bench/tune.py --loader torch",
}
NEEDS = {
    "nodes": "root, Ray (`make test-nodes`)",
    "nodes16": "root, Ray, 16 cores",
    "parquet_ranks": "root",
    "peers": "`make bench` makes `.venv-peers`",
    "remote": "root",
}


def page(sections: Mapping[str, str]) -> str:
    """The page; ``sections`` are those of docs/benchmarks.md by the name of the result file, in their order."""
    not_shown = {path.stem for path in RESULTS.glob("*.json")} - set(sections)
    if not_shown:
        raise SystemExit(f"no section shows these results: {', '.join(sorted(not_shown))}")
    head = ["| measured | repeat with | needs | machine | date | targets |", "| --- | --- | --- | --- | --- | --- |"]
    rows = [row(name, section) for name, section in sections.items()]
    claims = [one["holds"] for one in json.loads((REPO / "docs" / "evidence" / "results.json").read_text()).values()]
    counts = {"held": claims.count("yes"), "claims": len(claims)}
    others = [
        f"| [{what.format(**counts)}]({page}) | {f'`{command}`' if command else ''} | {needs} |"
        for what, page, command, needs in OTHER_ROWS
    ]
    return "\n".join([INTRO, *head, *rows, OTHERS, *others, ""])


def row(name: str, section: str) -> str:
    """One result file as a line."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    machines = [part["machine"] for part in (found, *found.get("parts", {}).values()) if "machine" in part]
    gpu = next((one["gpu"] for one in machines if "gpu" in one), None)
    command = COMMANDS.get(name, f"python bench/{name}.py")
    if gpu:  # such a machine often has a Python with torch, and no environment of ours
        command = f"PYTHONPATH=src {command.replace('python', 'python3', 1)}"
    cpus = " and ".join(dict.fromkeys(f"{one['cpus']} × {one['cpu'].replace('(R)', '')}" for one in machines))
    days = sorted({one["when"].partition("T")[0] for one in machines})
    title = section.partition("\n")[0].removeprefix("## ")
    cells = (
        f"[{title}](benchmarks.md#{anchor(title)})",
        f"`{command}`",
        NEEDS.get(name, "an NVIDIA GPU" if gpu else ""),
        f"{gpu}, {cpus}" if gpu else cpus,
        " and ".join(days),
        targets(section),
    )
    return f"| {' | '.join(cells)} |"


def targets(section: str) -> str:
    """How many of the section's targets were reached; nothing where it has none."""
    states = re.findall(r"\| (holds|missed)\b", section)
    return f"{states.count('holds')} of {len(states)}" if states else "none set"


def anchor(title: str) -> str:
    """The heading's anchor, as MkDocs makes it."""
    plain = unicodedata.normalize("NFKD", title).encode("ascii", "ignore").decode()
    return re.sub(r"[-\s]+", "-", re.sub(r"[^\w\s-]", "", plain).strip().lower())
