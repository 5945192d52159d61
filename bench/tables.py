"""The results as a page of the documentation, made from the JSON files alone.

python bench/tables.py            write docs/benchmarks.md and its picture
python bench/tables.py --check    is the page what the results say?
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", "benchmarks-peers.png"

INTRO = """# Benchmarks

Measured by `make bench`, drawn up by `bench/tables.py` from `bench/results/`. Figures are one machine's; what counts
are the ratios, taken side by side in one run, contenders alternating, the best of the rounds. How each is taken is in
`bench/README.md`.
"""


def number(value: float | None, digits: int = 3) -> str:
    if value is None:
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def machine(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    return (
        f"{about['cpus']} × {about['cpu']}, {about['system']}, Python {about['python']}, {packages}; {about['when']}, "
        f"load {about['load']:.2g} when it began."
    )


# (result file, title, what has to be said about it)
SECTIONS = (
    ("loader_batches", "data.batches against bare numpy and torch's DataLoader", ""),
    (
        "gpu_loader",
        "data.batches to a GPU",
        "The rows on resident arrays are from a run of their own, some minutes after the others. Gathering from "
        "registered memory is a kernel: beside a computation of equal length it took as long as both in turn.",
    ),
    (
        "loader_transport",
        "legroom.DataLoader against torch's, two workers",
        "An epoch's middle: the first 24 batches, while workers start and take their memory, and the end are left out. "
        "With them, in rounds of 72 and 100 batches, the same code came to 4.1 to 5.3 times at 74 MB and 4.3 to 6.1 "
        "times at 24 MB: short epochs without persistent workers gain less.",
    ),
    ("stream", "legroom.stream against ParquetFile.iter_batches with defaults", ""),
    ("tune-torch", "legroom.tune against exhaustive search, torch's loader", ""),
    ("tune-legroom", "legroom.tune against exhaustive search, our loader", ""),
    ("parquet_ranks", "Three ranks on one Parquet file", ""),
    ("watch", "What watching costs", ""),
)
TITLES = {
    "attach": "An entry that is there already: until its first row has been read",
    "cold": "A first open of contiguous data, against hashing and copying",
    "gzip": "A first open of compressed chunks, against h5py",
    "epoch": "The first epoch of a fresh process, against its second",
    "storm": "48 processes at once on a cold file",
}


NOTES = {
    "gzip": "h5py neither hashes nor shares what it reads. A load that does is bound by processor time: with both "
    "cores busy throughout, hashing with MD5 takes what decoding lacks, and for data that compress twentyfold "
    'writing the pages does. More cores, or `hash="xxh3"`, move that bound.',
}
HEAD = ["| | measured | target | |", "| --- | --- | --- | --- |"]


def section(name: str, title: str, note: str) -> str:
    """One result file as a table."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    parts = [found, *found.get("parts", {}).values()]
    rows = [row for part in parts for row in part.get("rows", part.get("ratios", ()))]
    about = machine(found["machine"])
    if "gpu" in found["machine"]:
        about = f"{found['machine']['gpu']}; {about}"
    lines = [f"## {title}", "", about, "", *HEAD, *(table_row(row) for row in rows)]
    return "\n".join([*lines, "", note] if note else lines)


def cache_table(found: dict[str, Any]) -> str:
    lines = ["## The cache against what it replaces"]
    shown = ""
    for name, part in found["parts"].items():
        about = machine(part["machine"])
        if about != shown:  # parts may have been measured apart
            lines += ["", about]
            shown = about
        lines += ["", f"### {TITLES[name]}", "", *HEAD]
        lines += [table_row(row) for row in part["rows"]]
        lines += ["", NOTES[name]] if name in NOTES else []
    return "\n".join(lines)


def table_row(row: dict[str, Any]) -> str:
    sign = "≥" if row["at_least"] else "≤"
    target = "" if row["target"] is None else f"{sign} {number(row['target'])}"
    state = {None: "", True: "holds", False: "missed"}[row["holds"]]
    note = "; ".join(part for part in (state, row["note"]) if part)
    what = f"– {row['what'].strip()}" if row["what"].startswith("  ") else row["what"]
    return f"| {what} | {number(row['value'])} {row['unit']} | {target} | {note} |"


def peer_row(peer: dict[str, Any], counts: list[str]) -> str:
    title = f"{peer['title']} {peer['version'] or ''}".strip()
    found = peer.get("summary")
    if not found:
        return f"| {title} | not measured: {peer.get('why', 'it does not import')} |" + " |" * 5
    memory = " / ".join(f"{found['memory'][count]['beyond_bare_mb']:.0f}" for count in counts)
    rates, killed = found["gather_gb_s"], found["killed"]
    gather = f"{number(rates['own'])} / {number(rates['take']) or '–'}"
    survived = f"{killed['others_finished']} of {killed['kills']}"
    left = number(killed["left_tidied_mb"] or 0.0)
    return f"| {title} | {number(found['attach_ms'])} | {memory} | {gather} | {survived} | {left} | {found['elects']} |"


def peers_table(found: dict[str, Any]) -> str:
    counts = found["processes"]
    lines = [
        f"## Ways to give several processes the same {found['megabytes']:.0f} MB",
        "",
        machine(found["machine"]),
        "",
        f"| | attach, ms | MB beyond bare interpreters, {' / '.join(counts)} processes | gather GB/s, own / np.take | "
        "others finish when the loader is killed | left behind, MB | one loader by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(peer_row(peer, counts) for peer in found["peers"].values()),
        "",
        f"![The same as a picture]({PICTURE})",
    ]
    return "\n".join(lines)


def page() -> str:
    cache, peers = (json.loads((RESULTS / f"{name}.json").read_text()) for name in ("cache", "peers"))
    # A result that has not been measured yet has no section; `make bench` and `make gpu` write them all.
    others = [section(*one) for one in SECTIONS if (RESULTS / f"{one[0]}.json").exists()]
    return "\n\n".join((INTRO.rstrip(), cache_table(cache), *others, peers_table(peers))) + "\n"


def main() -> None:
    if "--check" in sys.argv[1:]:
        if (
            PAGE.read_text() != page()
            or (DOCS / PICTURE).read_bytes() != (RESULTS / "peers.png").read_bytes()
        ):
            sys.exit(f"{PAGE} is not what bench/results says: run bench/tables.py")
        return
    PAGE.write_text(page())
    shutil.copyfile(RESULTS / "peers.png", DOCS / PICTURE)


if __name__ == "__main__":
    main()
