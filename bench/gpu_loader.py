"""Batches to a GPU, side by side with what bounds them and with torch's DataLoader.

Covers: which parts there are, their ratios against the targets, the result file. Does not cover: the contenders
(gpu_loader_paths.py), batches in memory (loader.py).

    PYTHONPATH=src python3 bench/gpu_loader.py [--rows 8000] [--rounds 3] [--only right,link,torch,card,…]

Bytes are counted once, as they arrive. A copy on the card and a gather on the card both read and write each of them,
so their ratio needs no factor. Every figure stands by itself: one that cannot be taken is kept as its error. The result
goes to $OUT/gpu_loader.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import time
from functools import partial
from typing import Any

from gpu_loader_paths import CARD_SIZES, SIZES, card, link, loaders, odd, overlap, registering, right, staged
from gpu_loader_rig import ROW, Bench
from measure import Row, as_json, gpu_machine, places, save, show

PARTS = {
    "right": right,
    "link": link,
    "torch": loaders,
    "card": card,
    "staged": staged,
    "odd": odd,
    "registering": registering,
    "overlap": overlap,
}
# What is compared: in words, above, below, and the least it should be.
Ratio = tuple[str, str, str, float | None]


def comparisons() -> list[Ratio]:
    """Every ratio, in the order of the table."""
    found: list[Ratio] = []
    for size in SIZES:
        below = f"link {size} pinned H2D"
        for name in ("copy engines", "kernel", "index_select", "bare index_select"):
            target = 0.95 if (size, name) == (256, "copy engines") else None
            found.append((f"{name}, {size} rows : pinned H2D", f"link {size} {name}", below, target))
    for size in (64, 256):
        theirs = f"torch {size} DataLoader, 8 workers"
        found.append((f"copy engines, {size} rows : torch's DataLoader", f"link {size} copy engines", theirs, 15.0))
    for size in CARD_SIZES:
        target = 0.7 if size == 1024 else None
        found.append((f"resident, {size} rows : D2D copy", f"card {size} batches", f"card {size} D2D copy", target))
    for name in ("pinned buffers", "plain copies"):
        found.append((f"{name}, 256 rows : pinned H2D", f"staged 256 {name}", "link 256 pinned H2D", None))
    for width in (1, 2, 4):
        found.append((f"kernel: {width}-byte words : 16-byte words", f"width {width} kernel", "link 256 kernel", None))
    return found


def compared(bench: Bench, asked: Ratio) -> Row:
    """One line of the table, with the rates behind it."""
    what, above, below, target = asked
    over, under = bench.rate(above), bench.rate(below)
    note = f"{over / 1e9:.1f} : {under / 1e9:.1f} GB/s"
    return Row(what, over / under, "×", target, at_least=True, note=note)


def beside_products(bench: Bench) -> list[Row]:
    """A batch beside matrix products of equal length: the time of both as a multiple of the longer one."""
    found = bench.notes.get("overlap_step_s", {})
    return [
        Row(
            f"{path} beside matrix products : the longer of both", times["both : longer"], "×",
            1.08 if path == "cuda-copy-engine" else None, note=f"{1e3 * times['both']:.2f} ms a step",
        )
        for path, times in found.items()
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description="Batches to a GPU, side by side with what bounds them.")
    parser.add_argument("--rows", type=int, default=8000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(PARTS))
    asked = parser.parse_args()
    where = gpu_machine()
    with places() as (_, disk):
        bench = Bench(disk, asked.rows, asked.rounds)
        for name in asked.only.split(","):
            start = time.perf_counter()
            bench.attempt(name, partial(PARTS[name], bench))
            print(f"{name}: {time.perf_counter() - start:.1f} s", flush=True)
            path = save("gpu_loader", result(bench, where, []))  # should the next part end everything
        rows = [row for ratio in comparisons() if (row := bench.attempt(ratio[0], partial(compared, bench, ratio)))]
        rows += beside_products(bench)
        path = save("gpu_loader", result(bench, where, rows))
        bench.close()
    print(show(rows))
    for key, value in bench.notes.items():
        print(f"{key}: {value}")
    print(path)


def result(bench: Bench, where: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
    """The file's content."""
    return {
        "machine": where,
        "data": {"rows": bench.rows, "row_bytes": ROW},
        "ratios": as_json(rows),
        "bytes_a_second": bench.rates(),
        "notes": bench.notes,
        "errors": bench.errors,
    }


if __name__ == "__main__":
    main()
