"""What reading Parquet takes: as much as the file or its row groups by default, a few megabytes page by page.

Covers: the peak of Arrow's pool, and of the process above what it was before, for the usual ways to read one table
laid out in row groups of 5 MB and in a single one, each in a process of its own; what a memory map saves; what giving
unused memory back does to the process.
Does not cover: speed.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import experiment as ex

ROWS, GROUPS = 26_000, 20
BOUNDED = {"pre_buffer": False, "buffer_size": 64 << 10}


def write(folder: Path) -> dict[str, Path]:
    """The same 100 MB of rows in two layouts, and strings, which leave an allocator more to keep."""
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    rng = np.random.default_rng(0)
    vectors = pa.FixedSizeListArray.from_arrays(pa.array(rng.standard_normal(ROWS * 48, np.float32)), 48)
    part = pa.table({"id": np.arange(ROWS), "x": vectors})
    whole = pa.concat_tables([part] * GROUPS)
    words = [f"{number} " * 20 for number in rng.integers(0, 1 << 30, 100_000)]
    paths = {name: folder / f"{name}.parquet" for name in ("small", "single", "text")}
    pq.write_table(whole, paths["small"], row_group_size=ROWS)
    pq.write_table(whole, paths["single"], row_group_size=ROWS * GROUPS)
    pq.write_table(pa.table({"text": words * 4}), paths["text"], row_group_size=400_000)
    return paths


def _read_table(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield pq.read_table(path)


def _dataset(path: str) -> Iterator[Any]:
    import pyarrow.dataset

    yield from pyarrow.dataset.dataset(path).to_batches()


def _defaults(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(path).iter_batches()


def _mapped(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(path, memory_map=True).iter_batches()


def _row_groups(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    file = pq.ParquetFile(path, **BOUNDED)
    for index in range(file.num_row_groups):
        yield file.read_row_group(index)


def _pages(path: str) -> Iterator[Any]:
    import pyarrow.parquet as pq

    yield from pq.ParquetFile(path, **BOUNDED).iter_batches(batch_size=4096)


WAYS: dict[str, tuple[str, Callable[[str], Iterator[Any]]]] = {
    "read_table": ("read_table(path)", _read_table),
    "dataset": ("dataset(path).to_batches()", _dataset),
    "defaults": ("ParquetFile(path).iter_batches()", _defaults),
    "mapped": ("… with memory_map=True", _mapped),
    "row_groups": ("… pre_buffer=False, buffer_size=64K, read_row_group(i)", _row_groups),
    "pages": ("… pre_buffer=False, buffer_size=64K, iter_batches(4096)", _pages),
}


def inside(way: str, path: str) -> None:
    """Read it all that way; print the pool's peak and the process's, and its size before and after giving back."""
    import pyarrow as pa
    import pyarrow.dataset
    import pyarrow.parquet

    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before, rows = resident("VmRSS"), 0
    for batch in WAYS[way][1](path):
        rows += batch.num_rows
        del batch
    pool = pa.default_memory_pool()
    found = {"rows": rows, "pool": pool.max_memory(), "growth": resident("VmHWM") - before}
    kept = resident("VmRSS")
    pool.release_unused()
    print(json.dumps({**found, "kept": kept, "given": resident("VmRSS"), "by": pool.backend_name}))


def resident(name: str) -> int:
    """A size of this process, in bytes."""
    return int(Path("/proc/self/status").read_text().partition(name + ":")[2].split()[0]) * 1024


def measured(way: str, path: Path) -> dict[str, Any]:
    child = ex.run(ex.role(__file__, way, path))
    if child.returncode:
        raise SystemExit(child.stderr)
    found: dict[str, Any] = json.loads(child.stdout)
    return found


def main() -> None:
    ex.need_module("pyarrow")
    if not Path("/proc/self/clear_refs").exists():
        ex.not_shown("the process's size is read from /proc")
    with tempfile.TemporaryDirectory(prefix="legroom-evidence-") as folder:
        paths = write(Path(folder))
        found = {way: [measured(way, paths[name]) for name in ("small", "single")] for way in WAYS}
        text = measured("defaults", paths["text"])
    peaks = {way: [one["pool"] for one in pair] for way, pair in found.items()}
    growth = {way: [one["growth"] for one in pair] for way, pair in found.items()}
    for name, figures in (("Arrow's pool", peaks), ("the process's growth", growth)):
        ex.table(
            (f"peak of {name} for 100 MB", f"{GROUPS} row groups of 5 MB", "a single row group"),
            [(WAYS[way][0], *map(ex.mb, pair)) for way, pair in figures.items()],
        )
    print(f"after reading 90 MB of strings the process has {ex.mb(text['kept'])}; once the pool ({text['by']}) was")
    print(f"asked to give back what it does not use, {ex.mb(text['given'])}\n")
    small, single = range(2)
    ex.verdict(
        {
            "every way read every row": len({one["rows"] for pair in found.values() for one in pair}) == 1,
            "page by page takes a few megabytes": max(peaks["pages"]) < 12 * ex.MB,
            "whatever the row groups": peaks["pages"][single] < 2 * peaks["pages"][small],
            "row group by row group grows with them": peaks["row_groups"][single] > 4 * peaks["row_groups"][small],
            "defaults take many times as much": min(peaks["defaults"]) > 5 * max(peaks["pages"]),
            "a memory map does not spare the process": min(growth["mapped"]) > 3 * max(growth["pages"]),
            "mimalloc gives back": text["by"] != "mimalloc" or text["given"] < text["kept"],
        }
    )


if __name__ == "__main__":
    inside(*sys.argv[1:]) if len(sys.argv) > 1 else main()
