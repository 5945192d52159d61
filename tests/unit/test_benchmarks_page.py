"""The pages of measured figures are what the result files say, and their commands can be run."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).parents[2]


def test_the_pages_are_up_to_date() -> None:
    done = subprocess.run([sys.executable, "bench/tables.py", "--check"], cwd=REPO, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_that_repeats_a_measurement_exists() -> None:
    rows = [line.split(" | ") for line in (REPO / "docs" / "measured.md").read_text().splitlines() if " | `" in line]
    commands = [cells[1].strip("`") for cells in rows if cells[1].startswith("`")]
    targets = set(re.findall(r"(?m)^([a-z-]+):", (REPO / "Makefile").read_text()))
    scripts = {path for command in commands for path in re.findall(r"\S+\.py\b", command)}
    assert len(commands) > 30 and len(scripts) > 20
    assert [path for path in sorted(scripts) if not (REPO / path).is_file()] == []
    assert {command.split()[1] for command in commands if command.startswith("make ")} <= targets
    flags = {(path, flag) for command in commands for path in re.findall(r"\S+\.py\b", command)
             for flag in re.findall(r"--\w+", command)}  # fmt: skip
    assert flags and all(f'"{flag}"' in (REPO / path).read_text() for path, flag in flags)


def _run_by(target: str) -> set[str]:
    recipe = re.search(rf"(?m)^{target}:.*\n((?:\t.*\n)+)", (REPO / "Makefile").read_text())
    assert recipe is not None
    return set(re.findall(r"bench/(\w+\.py)", recipe[1])) - {"tables.py"}


def test_the_list_of_benchmarks_says_what_make_bench_leaves_out() -> None:
    page = (REPO / "bench" / "README.md").read_text()
    listed = re.findall(r"(?m)^\| `(\w+\.py)` \|", page)
    told = re.search(r"`make bench` runs all but\n(.*) and the last six, which need a GPU", page)
    assert told is not None and set(listed[-6:]) == _run_by("gpu")
    assert set(listed) - {*re.findall(r"`(\w+\.py)`", told[1]), *listed[-6:]} == _run_by("bench")
