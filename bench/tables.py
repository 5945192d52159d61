"""Write the benchmark page, the list of measurements and the READMEs' comparison from the JSON result files.

python bench/tables.py            write docs/benchmarks.md, its picture, docs/measured.md and the READMEs' comparison
python bench/tables.py --check    are they what the results say?
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
import comparison
import measured

HERE = Path(__file__).parent
RESULTS, DOCS = HERE / "results", HERE.parent / "docs"
PAGE, PICTURE = DOCS / "benchmarks.md", "benchmarks-peers.png"

INTRO = """# Benchmarks

`make bench` runs these benchmarks, and `bench/tables.py` writes this page from `bench/results/`. Compare the ratios,
not the absolute figures: the variants take turns in one run on one machine, and the best round counts. *Target* is the
goal set before the measurement; missed targets are listed too. `bench/README.md` describes each benchmark, and
[What was measured](measured.md) has the command that repeats each table.
"""


def number(value: float | None, digits: int = 3) -> str:
    if value is None or value != value:  # not a number: not measured
        return ""
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.{digits}g}"


def machine(about: dict[str, Any]) -> str:
    packages = ", ".join(f"{name} {version}" for name, version in about["packages"].items())
    card = about.get("gpu", "") + (f", driver {about['driver']}" if about.get("driver") else "")
    card += "; " if card else ""
    cpus = f"{about['cpus']} logical CPUs ({about['cpu'].replace('(R)', '')})"
    return (
        f"{card}{cpus}, {about['system']}, Python {about['python']}, {packages}; "
        f"{about['when']}, load {about['load']:.2g} at the start."
    )


TUNE_NOTE = (
    "Three datasets: *cheap* returns rows of a tensor, *computing* uses the CPU for 4 ms per sample, *waiting* sleeps "
    "for 4 ms. `2 × 1` means 2 workers with a prefetch factor of 1."
)
# (result file, title, explanation)
SECTIONS = (
    (
        "loader_batches",
        "data.batches compared with numpy and torch's DataLoader",
        "Both cores copy large batches; `np.take` uses one. While the training loop holds a batch, the next one needs "
        "another buffer, which costs a part of the gain. Small batches stay in the CPU cache: there `np.take` itself "
        "is not 1.4 times as fast as torch's DataLoader without workers.",
    ),
    (
        "gpu_loader",
        "data.batches to a GPU",
        "H2D and D2D are copies from host to GPU and within the GPU. The last lines run a batch at the same time as "
        "matrix products of equal length: 1 is a batch that costs nothing, 2 is one after the other.",
    ),
    (
        "gpu_train",
        "Training on a GPU with each way to load",
        "Steps a second as a share of the same training on one batch that stays in GPU memory. Only the path that was "
        "chosen has a target, and only where `cuda-registered`, the path before the copy engines, reaches at most "
        "0.92. DataLoaders, where they are listed, have 8 workers and `pin_memory` and took one round.",
    ),
    (
        "gpu_shared",
        "Processes that share one copy in GPU memory",
        "All processes have a context and have imported what they use before the first one attaches.",
    ),
    (
        "weights",
        "Model weights to a GPU",
        "Files and cache are in memory. *After its context*: the process has a CUDA context and has imported Legroom.",
    ),
    (
        "loader_transport",
        "legroom.DataLoader compared with torch's DataLoader, two workers",
        "The first 24 batches, during which workers start and allocate memory, and the last ones are left out. With "
        "them, in rounds of 72 and 100 batches, the same code was 4.1 to 5.3 times as fast at 74 MB and 4.3 to 6.1 "
        "times at 24 MB: short epochs without persistent workers gain less. At 32 kB most of the time is spent in "
        "torch's own loop and, with map-style datasets, in stacking samples.",
    ),
    (
        "share",
        "Trainers that share workers (share=)",
        "Four trainers, two workers, batches of 16. *work* is 5 ms of CPU time per sample. *No work* copies 600 kB per "
        "sample, *small samples* 49 kB. Each trainer counts its batches in the same seconds, after the producer has "
        "started. TensorSocket 0.0.5 without a GPU copies the bytes of each batch into a message for each consumer. "
        "A run of 2026-11-18, beside other programs, gave the same ratios for *work* (3.93, 0.98 and 0.99). Without "
        "work one trainer with share= reached 0.91 of one without (0.93 by CPU time): share= costs some microseconds "
        "per batch.",
    ),
    (
        "stream",
        "legroom.stream compared with ParquetFile.iter_batches",
        "Batches of 1024 rows, compared with pyarrow's default of 65,536. The last digit varies on two cores. Two "
        "runs some minutes earlier, of code that still counted exact bytes, gave these ratios in the order of the "
        "table: 0.96 and 0.89, 0.89 and 0.99, 0.90 and 0.95, 0.92 and 0.98.",
    ),
    ("tune-torch", "legroom.tune compared with an exhaustive search, torch's DataLoader", TUNE_NOTE),
    ("tune-legroom", "legroom.tune compared with an exhaustive search, legroom.DataLoader", TUNE_NOTE),
    (
        "parquet_ranks",
        "Three ranks on one Parquet file",
        "*Limited memory* is a cgroup of 1.5 GB with 512 MB of swap; *plenty* is the same without a limit.",
    ),
    (
        "freeze",
        "legroom.freeze compared with a plain list and with pickles in a numpy buffer",
        "Annotations as in COCO. *Copies in all*: PSS of a process and its forked workers after three epochs, without "
        "that of the same processes without data, divided by the size of the data in one process. The plain list has "
        "fewer records, because its copies have to fit into RAM. The copies were counted in an earlier run of the "
        "same day, beside other programs. Three runs of that day built 176, 205 and 177 MB per second of CPU time on "
        "one core; the last is shown.",
    ),
    (
        "remote",
        "From S3 to a usable entry",
        "The server is a process of its own on the same two cores. The machine was busy (the load is in "
        "`bench/results/remote.json`); the benchmark ran before all other programs, in a scheduler group of its own "
        "(`echo -20 > /proc/self/autogroup`). Two runs before gave 0.887 and 0.893 of the link, 1.37 and 1.53 × at "
        "30 ms: the first without what the second and the third have. About 0.2 s of a load do not depend on the "
        "size: making the S3 client, asking for the version, and publishing the entry.",
    ),
    (
        "nodes",
        "One object on four Ray nodes",
        "Four nodes in network and mount namespaces on the same two cores, each with a link of 100 or 25 MB/s in both "
        "directions. The machine was busy with other programs (load 30 to 40); the nodes and the benchmark ran before "
        "them, in scheduler groups of their own (`/proc/PID/autogroup`: -20). One node alone is limited by its link. "
        "So are four with links of 25 MB/s: the bytes take little longer than those of one node, and the rest is that "
        "two cores start the processes of four nodes. With links of 100 MB/s four nodes are limited by CPU time: "
        "15.0 s of it take at least 7.5 s on two cores, and 1.25 × would be 6.8 s. *Ray alone* transfers objects of "
        "4 MiB, which each node asks for in one call; in a run before, it reached 69 MB/s of 100. That run, with "
        "smaller parts, took 1.86 × with links of 100 MB/s and 1.15 × with links of 25 MB/s.",
    ),
    (
        "nodes16",
        "One object on four Ray nodes, on sixteen cores",
        "The same benchmark on a machine with cores enough for four nodes. Links of 100 MB/s, three rounds.",
    ),
    (
        "gpu_shared_batches",
        "Trainers on one GPU that share workers (share=)",
        "6 ms of CPU time per sample, batches of 64 images (38 MB), 16 workers on 16 cores. The contenders took turns, "
        "and the median of five rounds counts. Images a second of all trainers together.",
    ),
    (
        "leak",
        "Overhead of legroom leak",
        "Turns of two seconds with and without recording alternate in one process. Single turns differ by more than "
        "the overhead, and a ratio below 1 is noise: three runs of the same day gave 1.03, 1.03 and 1.00 for steps of "
        "20 ms, 1.15, 1.07 and 0.85 for steps of 2 ms; the last is shown. At the start of a run the recording may take "
        "1.2 s once.",
    ),
    ("watch", "Overhead of legroom watch", ""),
    ("startup", "Start-up time of the command line", "*Over bare*: in addition to `python -c pass`."),
    (
        "formats",
        "Decoding HDF5 compared with h5py",
        "Both read a file in the page cache into their own memory. Nothing is hashed or shared.",
    ),
    (
        "formats_peers",
        "Data formats compared with their own libraries",
        "One process, by the CPU time of its thread. *Tokens*: a bare gather is `numpy.take` of rows of the same bytes "
        "as a window, of other rows in every round. Into one buffer, which stays in the CPU cache, it is a limit for a "
        "loop that has used up a batch before the next one; two buffers are what a loop needs that still holds one. "
        "*Samples*: raw bytes of 110 kB, not decoded. *Copies*: by how much more the PSS of eight processes is "
        "than that of eight with fewer samples, per byte of data, after they have read everything. The shared entry is "
        "counted once. "
        "Files that a peer reads stay in the page cache; what it maps counts, what it reads does not. "
        "Values of LMDB *as bytes*: it depends on the pages of the entry ([why](decisions/0012-huge-pages.md)). "
        "*A barest loop* is a generator that indexes the same windows and returns the same dicts of tensors, without "
        "ranks, a position to resume from, prefetching or a repeat after an error; Legroom gathers small batches in "
        "groups, which that loop does not. *Hugging "
        "Face directory*: of the memory that a process takes for itself, 8 bytes a row are the order of the next "
        "epoch, and 2 kB for each record batch are Arrow's and numpy's objects. After a fork these lie in pages of "
        "the parent's heap, which are copied for them: 35 kB for each record batch.",
    ),
)
TITLES = {
    "attach": "Open an entry that is already in the cache, to its first row",
    "cold": "First open of contiguous data, compared with hashing and copying",
    "gzip": "First open of compressed chunks, compared with h5py",
    "epoch": "First epoch of a new process, compared with its second",
    "pages": "An entry in memory, in pages of 4 kB and of 2 MB",
    "many": "First open beside many entries, and of a file of many arrays",
    "storm": "48 processes open a file that is not in the cache",
}


NOTES = {
    "gzip": "h5py neither hashes nor shares the data; *legroom's reader alone* does the same work as h5py. A load into "
    "the cache is limited by CPU time. The last row of each block is the highest possible ratio: the time for reading, "
    "inflating, MD5 and writing, divided by the number of cores, or the longest part that one thread must do. For "
    "photographs this limit is below the target on this machine (2.37 in one run, in which h5py took 1389 ms and "
    "Legroom reached 1.88), and above it on two cores of the other machine. More cores or "
    '`hash="xxh3"` raise it. The run on sixteen cores decoded with sixteen threads. The current number is eight: with '
    "it the reader alone took 108 ms instead of 149 ms for masks, and 162 ms instead of 151 ms for photographs.",
    "pages": "`LEGROOM_LARGE_PAGES=0` compared with the default, which uses huge pages where they cost at most twice "
    "as much as 4 kB pages ([why](decisions/0012-huge-pages.md)). How many are available depends on what the machine "
    "has just freed: 16 to 81% of this entry in six runs. A load was 1.07 to 1.37 times as fast, the first epoch 0.86 "
    "to 1.7 times and the second 0.80 to 1.22 times; the lower figures are from runs with few huge pages.",
}
CACHES = (
    ("cache", "The cache compared with h5py, md5sum and cp"),
    ("cache-xeon-2", "The cache on two cores of another machine"),
    ("cache-xeon-16", "The cache on sixteen cores"),
)
PEERS_NOTE = (
    "*One loader by*: what makes sure that only one process loads the data. Gather rates vary in this virtual machine "
    "with the memory that a process happens to get. Half an hour earlier a run gave 18.6 GB/s for Legroom and 17.2 for "
    "numpy's memmap (np.take); the one before that 15 and 22. One entry, read through Legroom and through np.load with "
    "mmap_mode in the same process: 16.9 and 17.3, 16.4 and 16.0, 16.4 and 14.2, 14.7 and 15.6 GB/s."
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
    space = "" if row["unit"].startswith("%") else " "
    return f"| {what} | {number(row['value'])}{space}{row['unit']} | {target} | {note} |"


def gpu_memory_table(found: dict[str, Any]) -> str:
    """Batch sizes and GPU memory: predicted and measured."""
    lines = [
        "## GPU memory: predicted and measured",
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
                f"within 3% | {state}; {one['trials']} trials against {one['brute_trials']} of brute force |"
            )
        elif name.startswith("estimate-"):
            lines.append(
                f"| estimated peak, {name.removeprefix('estimate-')} | {one['off']:+.1%} of the measured | "
                f"± {one['error']:.0%} | {'holds' if abs(one['off']) <= one['error'] else 'missed'} |"
            )
    account = found["account"]
    share = account["unknown"] / account["size"]
    lines.append(f"| account: unknown | {share:.3%} of the GPU | ≤ 2% | {'holds' if share <= 0.02 else 'missed'} |")
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
        f"## Share {found['megabytes']:.0f} MB between processes: Legroom and alternatives",
        "",
        machine(found["machine"]),
        "",
        f"| | attach, ms | MB in addition to Python itself, {' / '.join(counts)} processes | "
        "gather GB/s, own / np.take | "
        "other processes finish if the loading one is killed | left behind, MB | one loader by |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(peer_row(name, peer, counts) for name, peer in found["peers"].items()),
        "",
        PEERS_NOTE,
        "",
        f"![The table as a chart]({PICTURE})",
    ]
    return "\n".join(lines)


def sections() -> dict[str, str]:
    """The sections of the page by the name of the result file."""
    made = {name: cache_table(name, title) for name, title in CACHES}
    # A result that has not been measured yet has no section; `make bench` and `make gpu` write most of them.
    made |= {one[0]: section(*one) for one in SECTIONS if (RESULTS / f"{one[0]}.json").exists()}
    made["gpu_memory"] = gpu_memory_table(json.loads((RESULTS / "gpu_memory.json").read_text()))
    made["peers"] = peers_table(json.loads((RESULTS / "peers.json").read_text()))
    return made


def main() -> None:
    shown = sections()
    page = "\n\n".join((INTRO.rstrip(), *shown.values())) + "\n"
    made = {PAGE: page.encode(), measured.PAGE: measured.page(shown).encode()}
    made |= {DOCS / PICTURE: (RESULTS / "peers.png").read_bytes()}
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
