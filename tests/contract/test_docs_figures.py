"""Figures in the docs are those in the results of experiments and benchmarks."""

from __future__ import annotations

import json
import re

import pytest
from doc_pages import REPO

_FIGURE = re.compile(r"(?<![\w.])\d+\.\d+(?![\w.]*\d)")


def test_every_figure_was_measured() -> None:
    results = REPO / "docs" / "evidence" / "results.json"
    measured = "\n".join(
        "\n".join([*one["lines"], *map(str, one["machine"].values())])
        for one in json.loads(results.read_text(encoding="utf-8")).values()
    )
    text = (REPO / "docs" / "myths.md").read_text(encoding="utf-8")
    prose = re.sub(r"`[^`]*`|\]\([^)]*\)", "", text)  # what is typed, and where links go, is no figure
    unknown = [figure for figure in _FIGURE.findall(prose) if figure not in measured]
    assert set(unknown) <= {"3.14", "5.75"}, unknown  # a version of Python, and what the arithmetic starts from


def test_the_table_of_workers_is_the_benchmarks() -> None:
    rates = json.loads((REPO / "bench" / "results" / "tune-torch.json").read_text(encoding="utf-8"))
    text = (REPO / "docs" / "myths.md").read_text(encoding="utf-8")
    (header,) = re.findall(r"^\| workers \| (.+) \|$", text, re.M)
    names = {"computing": "computing", "waiting": "waiting", "rows of a tensor, no work": "cheap"}
    for label, name in names.items():
        (row,) = re.findall(rf"^\| {label} \| (.+) \|$", text, re.M)
        for workers, shown in zip(map(int, header.split(" | ")), map(int, row.split(" | ")), strict=True):
            of_them = [one for one in rates[name]["search"] if one["workers"] == workers]
            assert shown == round(max(one["samples_per_second"] for one in of_them)), (label, workers)


# page, the sentence with its figure, the result file, and the row that it comes from
QUOTED = [
    ("docs/watch.md", r"took ([\d.]+)% of one core", "watch", "100 processes at 1 Hz"),
    (
        "docs/low-memory.md",
        r"\| Legroom \| 0 \| ([\d.]+) \|",
        "parquet_ranks",
        "limited memory, legroom: steps/s over read_table with plenty",
    ),
    (
        "docs/low-memory.md",
        r"([\d.]+) times the CPU time",
        "parquet_ranks",
        "limited memory, legroom: CPU time per step over the same",
    ),
    (
        "docs/low-memory.md",
        r"`read_table` in each \| ([\d.]+)",
        "parquet_ranks",
        "copies held by three ranks, read_table",
    ),
    (
        "docs/low-memory.md",
        r"`legroom.open` in each \| ([\d.]+)",
        "parquet_ranks",
        "copies held by three ranks, shared",
    ),
]


@pytest.mark.parametrize(("page", "sentence", "file", "what"), QUOTED)
def test_a_quoted_figure_is_the_benchmarks(page: str, sentence: str, file: str, what: str) -> None:
    (shown,) = re.findall(sentence, (REPO / page).read_text(encoding="utf-8"))
    found = json.loads((REPO / "bench" / "results" / f"{file}.json").read_text(encoding="utf-8"))
    (value,) = [row["value"] for row in found["rows"] if row["what"] == what]
    assert shown == f"{value:.{len(shown.partition('.')[2])}f}"
