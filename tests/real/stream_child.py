"""One loop over a stream in a process of its own, and what it took: run as a script, prints JSON.

    stream_child.py PATH {"memory": …}     or, for comparison, PATH plain

Covers: the peak of Arrow's pool and the growth of the process's resident memory above what it was before the stream was
made. Does not cover: judging them.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy  # noqa: F401
import pyarrow as pa
import pyarrow.compute
import pyarrow.dataset
import pyarrow.parquet as pq

from legroom.loader.stream.stream_dataset import stream


def resident(name: str) -> int:
    """VmRSS or VmHWM, in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * 1024
    raise AssertionError(f"/proc/self/status has no {name}")


def main() -> None:
    path, options = sys.argv[1], sys.argv[2]
    pool = pa.default_memory_pool()
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
    before = resident("VmRSS")
    if options == "plain":
        batches = pq.ParquetFile(path).iter_batches()
        room = None
    else:
        given = json.loads(options)
        if "filters" in given:
            given["filters"] = [tuple(term) for term in given["filters"]]  # JSON knows lists only
        batches = stream(path, **given)
        room = batches.memory_division.arrow
    rows = count = 0
    for batch in batches:
        rows += batch.num_rows if isinstance(batch, pa.RecordBatch) else _rows(batch)
        count += 1
        del batch
    print(
        json.dumps(
            {
                "rows": rows,
                "batches": count,
                "pool": pool.max_memory(),
                "allowed": room,
                "growth": resident("VmHWM") - before,
                "left": pool.bytes_allocated(),
            }
        )
    )


def _rows(batch: object) -> int:
    return len(batch) if isinstance(batch, list) else len(next(iter(batch.values())))  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
