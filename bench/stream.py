"""Streaming Parquet within a bound: Legroom and pyarrow's own iteration, side by side.

Covers: seconds for one pass over files in the page cache, and the peak of Arrow's pool and of the process, each in a
process of its own. Does not cover: cold disks, where the disk decides.

    python bench/stream.py [--scale 1] [--rounds 7] [--results FOLDER]

Both give the same rows in batches of the same size; ``defaults`` is ParquetFile(path).iter_batches() as it comes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import legroom
from measure import RESULTS, Row, alternate, as_json, best, in_words, machine, save, show, spreads, warm

MB = 1 << 20
BATCH = 1024
PASSES = 3
MEMORY = "256MB"
FLOOR = 0.9  # of the speed of iter_batches with defaults
POOL_CASE, POOL = "row groups of 5 MB", 12.0  # MB; holds for batches of less than 2 MB

Case = Callable[[Path, float], None]


def row_groups_of_5_mb(path: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = 13_000
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(rows * 96, np.float32)), 96)
    table = pa.table({"id": np.arange(rows), "label": rng.integers(0, 10, rows), "x": vectors})
    pq.write_table(pa.concat_tables([table] * max(1, int(40 * scale))), path, row_group_size=rows)


def many_columns(path: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = max(1, int(2_000_000 * scale))
    table = pa.table({f"c{index}": rng.standard_normal(rows) for index in range(40)})
    pq.write_table(table, path, row_group_size=100_000)


def texts(path: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = max(1, int(800_000 * scale))
    words = rng.integers(0, 1 << 30, rows)
    table = pa.table({"id": np.arange(rows), "text": [f"{word} " * 40 for word in words]})
    pq.write_table(table, path, row_group_size=50_000, compression="zstd")


def one_row_group_of_1_gb(path: Path, scale: float) -> None:
    rng = np.random.default_rng(0)
    rows = max(1, int((1 << 20) * scale))
    table = pa.table({f"c{index}": rng.integers(0, 1 << 20, rows) for index in range(8)})
    pq.write_table(pa.concat_tables([table] * 16), path, row_group_size=16 * rows, use_dictionary=False)


CASES: dict[str, Case] = {
    "row groups of 5 MB": row_groups_of_5_mb,
    "40 columns": many_columns,
    "texts, zstd": texts,
    "one row group of 1 GB": one_row_group_of_1_gb,
}


def by_defaults(path: str) -> int:
    return sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches())


def by_size(path: str) -> int:
    return sum(batch.num_rows for batch in pq.ParquetFile(path).iter_batches(batch_size=BATCH))


def by_legroom(path: str) -> int:
    return sum(batch.num_rows for batch in legroom.stream(path, batch_size=BATCH, memory=MEMORY))


CONTENDERS = {"defaults": by_defaults, "same batches": by_size, "legroom": by_legroom}


def child(name: str, path: str) -> None:
    """One warm-up pass, then the best of some: the first use of a library is no throughput."""
    CONTENDERS[name](path)
    seconds = math.inf
    for _ in range(PASSES):
        start = time.perf_counter()
        rows = CONTENDERS[name](path)
        seconds = min(seconds, time.perf_counter() - start)
    status = Path("/proc/self/status")
    peak = None
    if status.exists():
        peak = int(status.read_text().partition("VmHWM:")[2].split()[0]) * 1024
    print(json.dumps({"rows": rows, "seconds": seconds, "pool": pa.default_memory_pool().max_memory(), "peak": peak}))


def measure(path: Path, rounds: int) -> tuple[dict[str, list[float]], dict[str, dict[str, float]]]:
    """Seconds of every round, and the memory of the last."""
    last: dict[str, dict[str, float]] = {}

    def one(name: str) -> Callable[[], float]:
        def run() -> float:
            done = subprocess.run(
                [sys.executable, __file__, "--child", name, str(path)], capture_output=True, text=True, check=True
            )
            last[name] = json.loads(done.stdout)
            return last[name]["seconds"]

        return run

    figures = alternate({name: one(name) for name in CONTENDERS}, rounds)
    assert len({found["rows"] for found in last.values()}) == 1
    return figures, last


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--scale", type=float, default=1, help="a fraction of the data")
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--only", default="", help="the cases whose names contain this")
    options.add_argument("--results", type=Path, default=RESULTS, help="where the JSON goes")
    options.add_argument("--child", nargs=2, metavar=("NAME", "PATH"), help=argparse.SUPPRESS)
    given = options.parse_args()
    if given.child:
        child(*given.child)
        return
    where = machine("pyarrow", "numpy", "legroom")
    print(in_words(where), flush=True)
    rows: list[Row] = []
    details = {}
    with tempfile.TemporaryDirectory(prefix="legroom-bench-", dir="/var/tmp") as folder:
        for name, write in CASES.items():
            if given.only not in name:
                continue
            path = Path(folder) / "data.parquet"
            write(path, given.scale)
            os.sync()  # what is still on its way to the disk would be read beside it
            warm(path)
            figures, memory = measure(path, given.rounds)
            seconds = best(figures)
            ratio = seconds["defaults"] / seconds["legroom"]
            rows += [
                Row(f"{name}: speed over defaults", ratio, "×", FLOOR, at_least=True),
                Row(f"{name}: speed over same batches", seconds["same batches"] / seconds["legroom"], "×"),
                Row(f"{name}: Arrow's pool, batches of {BATCH}", memory["legroom"]["pool"] / MB, "MB",
                    POOL if name == POOL_CASE else None,
                    note=f"defaults {memory['defaults']['pool'] / MB:.0f} MB"),
            ]  # fmt: skip
            details[name] = {"bytes": path.stat().st_size, "seconds": spreads(figures), "memory": memory}
            path.unlink()
    print(show(rows))
    save("stream", {"machine": where, "rows": as_json(rows), "details": details}, given.results)


if __name__ == "__main__":
    main()
