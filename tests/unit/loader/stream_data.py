"""What the tests of streams share: files with known rows, and readers that are one worker of several."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq

from legroom.loader.stream import stream_dataset, stream_memory


def table(first: int, rows: int) -> pa.Table:
    """Rows that can be told apart, of kinds that are stored differently."""
    ids = range(first, first + rows)
    return pa.table(
        {
            "id": pa.array(ids, pa.int64()),
            "text": pa.array([f"row {number}" * (number % 5) for number in ids], pa.string()),
            "vector": pa.array([[number, number + 0.5] for number in ids], pa.list_(pa.float32(), 2)),
            "ragged": pa.array([list(range(number % 4)) for number in ids], pa.list_(pa.int16())),
            "part": pa.array([number % 3 for number in ids], pa.int8()),
        }
    )


def write(folder: Path, counts: list[int], group: int, kind: str = "parquet") -> tuple[list[Path], pa.Table]:
    """A file for each count, with row groups (or record batches) of ``group`` rows, and all rows as one table."""
    paths, tables, first = [], [], 0
    for number, count in enumerate(counts):
        path = folder / f"part-{number:03}.{kind}"
        tables.append(table(first, count))
        write_one(path, tables[-1], group, kind)
        paths.append(path)
        first += count
    return paths, pa.concat_tables(tables)


def write_one(path: Path, rows: pa.Table, group: int, kind: str = "parquet") -> Path:
    """One file; ``kind`` is parquet, feather (compressed), arrow (an IPC file) or stream."""
    if kind == "parquet":
        pq.write_table(rows, path, row_group_size=group)
    elif kind == "feather":
        feather.write_feather(rows, path, chunksize=group)
    else:
        opener = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
        with opener(path, rows.schema) as writer:
            writer.write_table(rows, max_chunksize=group)
    return path


def ids(batches: Any) -> list[int]:
    """The ids of all rows, in order."""
    return [number for batch in batches for number in batch.column("id").to_pylist()]


@contextmanager
def small_steps(rows: int) -> Iterator[None]:
    """Decode a few rows at a time: what happens between steps happens in small files too."""
    with patch.object(stream_memory, "_MOST_ROWS", rows):
        yield


@contextmanager
def as_worker(worker: int, workers: int) -> Iterator[None]:
    """Be one worker of a loader."""
    with patch.object(stream_dataset, "this_worker", lambda: (worker, workers)):
        yield
