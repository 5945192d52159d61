"""The results as a page of the documentation, made from the JSON files alone.

python bench/tables.py            write docs/benchmarks.md, its picture and the comparison in the READMEs
python bench/tables.py --check    are they what the results say?
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import comparison

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
    card = about.get("gpu", "") + (f", driver {about['driver']}" if about.get("driver") else "")
    card += "; " if card else ""
    return (
        f"{card}{about['cpus']} × {about['cpu']}, {about['system']}, Python {about['python']}, {packages}; "
        f"{about['when']}, load {about['load']:.2g} when it began."
    )


# (result file, title, what has to be said about it)
SECTIONS = (
    (
        "loader_batches",
        "data.batches against bare numpy and torch's DataLoader",
        "Large batches are copied by both cores, where a bare np.take has one; while the consumer has a batch the next "
        "one needs another buffer, which costs a part of that. Small batches stay in the processor's cache whoever "
        "gathers them: there the bare gather itself is not 1.4 times torch's loader without workers.",
    ),
    (
        "gpu_loader",
        "data.batches to a GPU",
        "Gathering from registered memory is a kernel: beside a computation of equal length it took as long as both "
        "in turn.",
    ),
    (
        "loader_transport",
        "legroom.DataLoader against torch's, two workers",
        "An epoch's middle: the first 24 batches, while workers start and take their memory, and the end are left out. "
        "With them, in rounds of 72 and 100 batches, the same code came to 4.1 to 5.3 times at 74 MB and 4.3 to 6.1 "
        "times at 24 MB: short epochs without persistent workers gain less. With 32 kB most of the time is torch's "
        "own: its loop and, with rows, stacking them.",
    ),
    (
        "stream",
        "legroom.stream against ParquetFile.iter_batches with defaults",
        "Batches of 1024 rows against batches of 65,536. Two cores are not steady enough for the last digit: two runs "
        "some minutes before, of code that still counted exact bytes, gave 0.96 and 0.89, 0.89 and 0.99, 0.90 and "
        "0.95, 0.92 and 0.98 times, in the order of the table.",
    ),
    ("tune-torch", "legroom.tune against exhaustive search, torch's loader", ""),
    ("tune-legroom", "legroom.tune against exhaustive search, our loader", ""),
    ("parquet_ranks", "Three ranks on one Parquet file", ""),
    ("watch", "What watching costs", ""),
    ("startup", "What a command costs over a bare interpreter", ""),
    (
        "formats",
        "Decoding HDF5 against h5py",
        "Both fill memory of their own from a file in the page cache; nothing is hashed or shared here.",
    ),
)
TITLES = {
    "attach": "An entry that is there already: until its first row has been read",
    "cold": "A first open of contiguous data, against hashing and copying",
    "gzip": "A first open of compressed chunks, against h5py",
    "epoch": "The first epoch of a fresh process, against its second",
    "pages": "An entry in memory, in pages of 4 kB and of 2 MB",
    "storm": "48 processes at once on a cold file",
}


NOTES = {
    "gzip": "h5py neither hashes nor shares what it reads; the reader alone does what it does. A load into the cache "
    "is bound by processor time: the last row of each block divides what reading, inflating, MD5 and writing take "
    "alone by the cores there are, or takes the longest of what one thread must do. For photographs that bound lies "
    "below the target on this machine (2.37 in one run, in which h5py took 1389 ms, and ours came to 1.88), and "
    "above it on two cores of the other one. More cores, or "
    '`hash="xxh3"`, move it. The run on sixteen cores read with sixteen threads; the reader has had eight since, which '
    "took 108 ms instead of 149 for masks and 162 instead of 151 for photographs there.",
    "pages": "`LEGROOM_LARGE_PAGES=0` against the default, which takes large pages until they cost more than small "
    "ones ([why](decisions/0012-large-pages.md)). How many there are to be had depends on what the machine has just "
    "freed: of this entry it was 16 to 81 % in six runs; a load was 1.07 to 1.37 times as fast, the first epoch "
    "0.86 to 1.7 and the second 0.80 to 1.22 times, the lower figures where few pages were large.",
}
CACHES = (
    ("cache", "The cache against what it replaces"),
    ("cache-xeon-2", "The same on two cores of another machine"),
    ("cache-xeon-16", "The same on all its sixteen"),
)
PEERS_NOTE = (
    "Gather rates are those of the memory a contender happened to get, which swings in this virtual machine: half an "
    "hour earlier a run gave 18.6 GB/s for Legroom and 17.2 for numpy's memmap (np.take), the one before that "
    "15 and 22. One entry read through Legroom's map and by np.load with mmap_mode in the same process: 16.9 and 17.3, "
    "16.4 and 16.0, 16.4 and 14.2, 14.7 and 15.6 GB/s."
)
HEAD = ["| | measured | target | |", "| --- | --- | --- | --- |"]


def section(name: str, title: str, note: str) -> str:
    """One result file as a table."""
    found = json.loads((RESULTS / f"{name}.json").read_text())
    parts = [found, *found.get("parts", {}).values()]
    rows = [row for part in parts for row in part.get("rows", part.get("ratios", ()))]
    lines = [f"## {title}", "", machine(found["machine"]), "", *HEAD, *(table_row(row) for row in rows)]
    return "\n".join([*lines, "", note] if note else lines)


def cache_table(file: str, title: str) -> str:
    found = json.loads((RESULTS / f"{file}.json").read_text())
    lines = [f"## {title}"]
    shown = ""
    for name, part in found["parts"].items():
        about = machine(part["machine"])
        if about != shown:  # parts may have been measured apart
            lines += ["", about]
            shown = about
        lines += ["", f"### {TITLES[name]}", "", *HEAD]
        lines += [table_row(row) for row in part["rows"]]
        lines += ["", NOTES[name]] if name in NOTES and file == CACHES[0][0] else []
    return "\n".join(lines)


def table_row(row: dict[str, Any]) -> str:
    sign = "≥" if row["at_least"] else "≤"
    target = "" if row["target"] is None else f"{sign} {number(row['target'])}"
    state = {None: "", True: "holds", False: "missed"}[row["holds"]]
    note = "; ".join(part for part in (state, row["note"]) if part)
    what = f"– {row['what'].strip()}" if row["what"].startswith("  ") else row["what"]
    return f"| {what} | {number(row['value'])} {row['unit']} | {target} | {note} |"


def gpu_memory_table(found: dict[str, Any]) -> str:
    """What is said of a card's memory, against what it turned out to be."""
    lines = [
        "## GPU memory: what was found and estimated, against what it was",
        "",
        machine(found["machine"]) if "machine" in found else f"{found['card']}, torch {found['torch']}.",
        "",
        *HEAD,
    ]
    for name, one in found.items():
        if name.startswith("finder-"):
            off, target = abs(one["off"]), max(0.03, 1 / one["brute"])
            state = "holds" if off <= target and one["trials"] <= 6 else "missed"
            lines.append(
                f"| batch size found, {name.removeprefix('finder-')} | {one['found']} of {one['brute']} | "
                f"within 3 % | {state}; {one['trials']} trials against {one['brute_trials']} of brute force |"
            )
        elif name.startswith("estimate-"):
            lines.append(
                f"| estimated peak, {name.removeprefix('estimate-')} | {one['off']:+.1%} of the measured | "
                f"± {one['error']:.0%} | {'holds' if abs(one['off']) <= one['error'] else 'missed'} |"
            )
    account = found["account"]
    share = account["unknown"] / account["size"]
    lines.append(
        f"| account: unknown | {share:.3%} of the card | ≤ 2 % | {'holds' if share <= 0.02 else 'missed'} |"
    )
    return "\n".join(lines)


def peer_row(name: str, peer: dict[str, Any], counts: list[str]) -> str:
    title = f"{peer.get('title', name)} {peer.get('version') or ''}".strip()
    found = peer.get("summary")
    if not found:
        why = next((str(peer[key]) for key in ("missing", "why") if peer.get(key)), "it does not import")
        return f"| {title} | not measured: {why} |" + " |" * 5
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
        *(peer_row(name, peer, counts) for name, peer in found["peers"].items()),
        "",
        PEERS_NOTE,
        "",
        f"![The same as a picture]({PICTURE})",
    ]
    return "\n".join(lines)


def page() -> str:
    peers = json.loads((RESULTS / "peers.json").read_text())
    caches = [cache_table(*one) for one in CACHES]
    # A result that has not been measured yet has no section; `make bench` and `make gpu` write them all.
    others = [section(*one) for one in SECTIONS if (RESULTS / f"{one[0]}.json").exists()]
    others.append(gpu_memory_table(json.loads((RESULTS / "gpu_memory.json").read_text())))
    return "\n\n".join((INTRO.rstrip(), *caches, *others, peers_table(peers))) + "\n"


def main() -> None:
    made = {PAGE: page().encode(), DOCS / PICTURE: (RESULTS / "peers.png").read_bytes()}
    made |= {path: comparison.filled(language).encode() for language, path in comparison.READMES.items()}
    if "--check" in sys.argv[1:]:
        late = [str(path) for path, wanted in made.items() if path.read_bytes() != wanted]
        if late:
            sys.exit(f"{', '.join(late)}: not what bench/results says; run bench/tables.py")
        return
    for path, wanted in made.items():
        path.write_bytes(wanted)


if __name__ == "__main__":
    main()
