"""The shared cache, side by side with what it replaces.

Covers: attaching, cold loads (cache_cold.py), the first epoch, large pages (cache_pages.py), many entries and
many arrays, many processes at once.
Does not cover: other libraries (peers.py), decoding alone (formats.py), cold disks, where the disk decides: sources are
in the page cache.

    python bench/cache.py [--rounds 7] [--only attach,cold,gzip,epoch,pages,many,storm] [--scale 1.0] [--results DIR]

Nothing is asserted: a target that is missed is printed as missed. With --only the other parts' results are kept.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import legroom
from cache_cold import cold, gzip, storm
from cache_pages import pages
from cache_rig import Bench, Measured, preload
from measure import RESULTS, Row, alternate, as_json, best, in_words, kept, machine, places, save, show, spreads, timed

OPEN = "import sys, legroom; legroom.open(sys.argv[1])['images'][0].max()"
PRELOAD = "import sys, h5py; h5py.File(sys.argv[1])['images'][:][0].max()"


def opened(path: Path) -> Callable[[], float]:
    """Seconds to attach and read the first row; unmapping is outside the clock."""

    def work() -> float:
        start = time.perf_counter()
        data = legroom.open(path)
        data["images"][0].max()
        seconds = time.perf_counter() - start
        data.ready()
        return seconds

    return work


def attach(bench: Bench) -> Measured:
    """An entry that is there already: how long until the first row has been read."""
    path, small, large = bench.file(368, "a"), bench.file(100, "small"), bench.file(1000, "large")
    for one in (path, small, large):
        legroom.open(one).ready()
    figures = alternate({"legroom": opened(path), "h5py": lambda: timed(lambda: preload(path))}, 3 * bench.rounds)
    sizes = alternate({"small": opened(small), "large": opened(large)}, 10 * bench.rounds)
    # A whole process, as a shell sees it: the interpreter, imports, the first row, the end.
    whole = alternate({"legroom": bench.process(OPEN, path), "h5py": bench.process(PRELOAD, path)}, bench.rounds)
    ours, theirs = (best(whole)[name] for name in ("legroom", "h5py"))
    fresh: dict[str, list[dict[str, float]]] = {"first": [], "preload": []}
    for _ in range(bench.rounds):
        for scene, found in fresh.items():
            found.append(bench.child(scene, path))
    least, by_size = best(figures), best(sizes)
    first, other = (min(one["first_ms"] for one in fresh[scene]) for scene in fresh)
    rows = [
        Row(f"attach and first row, {bench.size(368)}", 1e3 * least["legroom"], "ms", 1.0),
        Row("  median of the rounds", 1e3 * median(figures["legroom"]), "ms", 1.0),
        Row("h5py preload of the same file, warm", 1e3 * least["h5py"], "ms"),
        Row("  times as long", least["h5py"] / least["legroom"], "×", 50, True),
        Row("first open of a fresh process", first, "ms", note="without imports"),
        Row("  importing legroom.open after numpy", min(one["legroom_ms"] for one in fresh["first"]), "ms"),
        Row("  h5py preload in a fresh process", other, "ms"),
        Row("  times as long", other / first, "×", 50, True),
        Row("a whole process: start, imports, first row, exit", 1e3 * ours, "ms"),
        Row("  the same with an h5py preload", 1e3 * theirs, "ms"),
        Row("  times as long", theirs / ours, "×"),
        Row(f"{bench.size(1000)} against {bench.size(100)}", by_size["large"] / by_size["small"], "×", 1.5),
        Row("  medians", median(sizes["large"]) / median(sizes["small"]), "×", 1.5),
    ]
    return rows, {**spreads(figures), **spreads(sizes), "fresh": fresh, "whole": spreads(whole)}


def epoch(bench: Bench) -> Measured:
    """The first epoch of a fresh process against its second."""
    path = bench.file(368, "epoch")
    with legroom.open(path) as data:
        count, extent = len(data["images"]), data.where("images")
        assert extent is not None
        npy = extent.path
    runs: dict[str, list[list[float]]] = {"at-once": [], "ready": [], "plain": []}
    for _ in range(bench.rounds):
        for how, found in runs.items():
            found.append(bench.child("epochs", path, how, count, npy)["rates"])
    rows = []
    for how, target in (("at-once", 0.65), ("ready", 0.85), ("plain", None)):
        firsts, seconds = [run[0] for run in runs[how]], [run[1] for run in runs[how]]
        name = {"at-once": "started at once", "ready": "after data.ready()", "plain": "no pre-fault (np.load)"}[how]
        note = f"{max(firsts):.1f} of {max(seconds):.1f} GB/s"
        rows.append(Row(f"first epoch, {name}", max(firsts) / max(seconds), "of the second", target, True, note))
        middle = median(one / two for one, two in zip(firsts, seconds, strict=True))
        rows.append(Row("  median of the runs' ratios", middle, "of the second", target, True))
    return rows, {"gigabytes_per_second": runs}


def many(bench: Bench) -> Measured:
    """Many entries in the store, and many arrays in one file: what a cold open and an attach take then."""
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    path = bench.disk / "many.safetensors"
    for backing in ("shm", "disk"):
        # Files on a disk are synced: filling that store with more takes many minutes.
        counts = (0, 1000, 10_000) if backing == "shm" else (0, 1000)
        made = 0
        for count in (int(number * bench.scale) for number in counts):
            for source in sources(bench, "old", (np.full(100, number) for number in range(made, count))):
                open_and_close(source, backing)
            made = count
            values = (np.full(5000, -count - number / 1000) for number in range(3 * bench.rounds))
            new = sources(bench, "new", values)
            time.sleep(2.1)  # a younger file is hashed again by the second open
            cold = [open_and_close(source, backing) for source in new]
            warm = [open_and_close(source, backing) for source in new]
            raw[f"entries_{backing}_{count}"] = {"cold": cold, "warm": warm}
            for name, found in (("cold open of 40 kB", cold), ("  attach", warm)):
                walls, cpus = ([pair[index] for pair in found] for index in (0, 1))
                note = f"median {1e3 * median(walls):.2f}; CPU {1e3 * min(cpus):.2f}, median {1e3 * median(cpus):.2f}"
                rows.append(Row(f"{name}, {count} entries in {backing}", 1e3 * min(walls), "ms", note=note))
    for count in (int(1000 * bench.scale), int(20_000 * bench.scale)):
        cold, warm = [], []
        for number in range(bench.rounds):
            write_tensors(path, count, number)
            time.sleep(2.1)
            cold.append(open_and_close(path))
            warm.append(open_and_close(path))
        raw[f"arrays_{count}"] = {"cold": cold, "warm": warm}
        target = 2.0 if count == 20_000 else None
        least, second = ([min(part) for part in zip(*pairs, strict=True)] for pairs in (cold, warm))
        title = f"cold open of {count} tensors in one file"
        rows.append(Row(title, least[0], "s", target, note=f"CPU {least[1]:.2f} s"))
        rows.append(Row("  the second open", second[0], "s", note=f"CPU {second[1]:.2f} s"))
    return rows, raw


def open_and_close(path: Path, backing: str = "auto") -> tuple[float, float]:
    """Seconds that it takes, by the clock and of processor time."""
    start = time.process_time()
    wall = timed(lambda: legroom.open(path, backing=backing).close())
    return wall, time.process_time() - start


def sources(bench: Bench, name: str, arrays: Iterable[np.ndarray[Any, Any]]) -> list[Path]:
    """A file for each array, all older than the 20 ms for which the cache waits after a change."""
    folder = bench.disk / name
    folder.mkdir(exist_ok=True)
    paths = []
    for number, array in enumerate(arrays):
        paths.append(folder / f"{number}.npy")
        np.save(paths[-1], array)
    time.sleep(0.1)
    return paths


def write_tensors(path: Path, count: int, seed: int) -> None:
    """A safetensors file of that many tensors of 64 numbers."""
    size = 256
    header = {
        f"layer.{number}.weight": {"dtype": "F32", "shape": [64], "data_offsets": [number * size, (number + 1) * size]}
        for number in range(count)
    }
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    data = np.random.default_rng(seed).integers(0, 255, count * size, np.uint8)
    path.write_bytes(len(text).to_bytes(8, "little") + text + data.tobytes())


PARTS = {"attach": attach, "cold": cold, "gzip": gzip, "epoch": epoch, "pages": pages, "many": many, "storm": storm}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--only", default=",".join(PARTS), help="comma-separated: " + ", ".join(PARTS))
    options.add_argument("--scale", type=float, default=1.0, help="of every size, to see that it runs")
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    where = machine("numpy", "h5py", "deflate", "isal", "xxhash")
    print(in_words(where))
    parts: dict[str, Any] = kept("cache", given.results).get("parts", {})
    for name in given.only.split(","):
        with places() as (memory, disk):
            rows, raw = PARTS[name](Bench(memory, disk, given.rounds, given.scale))
        run = {"machine": where, "rounds": given.rounds, "scale": given.scale}
        parts[name] = {**run, "rows": as_json(rows), "raw": raw}
        print(f"\n{PARTS[name].__doc__}\n{show(rows)}", flush=True)
    print(f"\nkept in {save('cache', {'parts': parts}, given.results)}")


if __name__ == "__main__":
    main()
