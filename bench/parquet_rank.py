"""One rank of a training on a Parquet file of chats, in a process of its own: run as a script, prints JSON.

    parquet_rank.py hold  read_table|legroom PATH FOLDER NUMBER            holds the data until it is told to end
    parquet_rank.py train read_table|legroom PATH FOLDER RANK OF STEPS     trains so many steps, with the others

Covers: what a rank holds and how fast it steps. Does not cover: judging. ``read_table`` does what scripts do: the whole
file in Arrow's buffers of every rank. ``legroom`` holds the one shared copy, or streams where ``legroom.tune`` finds
that copies do not fit what the cgroup leaves.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

BATCH, LENGTH, WIDTH = 16, 128, 96
STREAM = "64MB"
COLUMNS = ("prompt", "response")


def write_chats(path: Path, size: int) -> None:
    """About ``size`` bytes of prompts and responses that do not compress, in row groups of about 4 MB."""
    letters = np.random.default_rng(0).integers(97, 123, 4 << 20, np.uint8)
    rows = len(letters) // 1024
    columns = {
        name: pa.StringArray.from_buffers(
            rows, pa.py_buffer(np.arange(0, (rows + 1) * 512, 512, dtype=np.int32)), pa.py_buffer(half)
        )
        for name, half in zip(COLUMNS, np.split(letters, 2), strict=True)
    }
    group = pa.table(columns)
    with pq.ParquetWriter(path, group.schema, compression="none", use_dictionary=False) as writer:
        for _ in range(max(1, size // group.nbytes)):
            writer.write_table(group)


# Holding.


def hold(how: str, path: str, folder: Path, number: str) -> None:
    small = folder / f"small-{number}.parquet"
    write_chats(small, 0)
    _load(how, str(small))  # so that what libraries hold for themselves is there before anything is measured
    _stage(folder, f"started-{number}", "load")
    before = _pss()
    table = _load(how, path)
    touched = sum(
        int(np.frombuffer(buffer, np.uint8)[::512].sum())
        for column in table.columns
        for chunk in column.chunks
        for buffer in chunk.buffers()
        if buffer is not None
    )
    _stage(folder, f"held-{number}", "measure")
    found = {"pss": _pss() - before, "bytes": table.nbytes, "touched": touched}
    (folder / f"measured-{number}.part").write_text(json.dumps(found))
    (folder / f"measured-{number}.part").rename(folder / f"measured-{number}")
    _stage(folder, f"waiting-{number}", "end")


def _load(how: str, path: str) -> Any:
    if how == "read_table":
        return pq.read_table(path)
    import legroom

    data = legroom.open(path)
    return data[next(iter(data))]


def _stage(folder: Path, reached: str, wanted: str) -> None:
    (folder / reached).touch()
    deadline = time.monotonic() + 600
    while not (folder / wanted).exists():
        if time.monotonic() > deadline:
            sys.exit(f"{wanted} did not arrive")
        time.sleep(0.02)


def _pss() -> int:
    for line in Path("/proc/self/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("smaps_rollup has no Pss")


# Training.


class Rows:
    """The file row by row, a row group at a time: what tune draws from."""

    def __init__(self, path: str) -> None:
        self._file = pq.ParquetFile(path, pre_buffer=False)
        self._each = self._file.metadata.row_group(0).num_rows

    def __len__(self) -> int:
        rows: int = self._file.metadata.num_rows
        return rows

    def __getitem__(self, index: int) -> Any:
        row = self._file.read_row_group(index // self._each).slice(index % self._each, 1).to_pylist()[0]
        return {name: text.encode() for name, text in row.items()}


def collate(rows: list[dict[str, bytes]]) -> Any:
    return tokens([row["prompt"] for row in rows]), tokens([row["response"] for row in rows])


def tokens(texts: list[bytes]) -> Any:
    """The first bytes of each text."""
    import torch

    joined = b"".join(text[:LENGTH].ljust(LENGTH) for text in texts)
    return torch.frombuffer(bytearray(joined), dtype=torch.uint8).view(len(texts), LENGTH).long()


def by_read_table(path: str, rank: int, of: int) -> tuple[Iterator[Any], str]:
    return shuffled(pq.read_table(path), rank, of), "read_table"


def shuffled(table: Any, rank: int, of: int) -> Iterator[Any]:
    """Rows one by one: ``take`` on a table of many chunks joins them all for every batch."""
    order = np.random.default_rng(0).permutation(len(table))[rank::of].tolist()
    while True:
        for first in range(0, len(order) - BATCH, BATCH):
            rows = order[first : first + BATCH]
            yield tuple(tokens([table[name][row].as_py().encode() for row in rows]) for name in COLUMNS)


def by_legroom(path: str, rank: int, of: int) -> tuple[Iterator[Any], str]:
    import legroom

    rows: Any = Rows(path)
    settings = legroom.tune(
        rows, batch_size=BATCH, effective_batch=BATCH * of, ranks=of, collate_fn=collate, step_seconds=0.05
    )
    if not settings.low_memory:
        return shuffled(_load("legroom", path), rank, of), settings.why["low_memory"]
    stream = legroom.stream(path, batch_size=BATCH, memory=STREAM, shuffle_buffer=4096, rank=rank, world_size=of)

    def streamed() -> Iterator[Any]:
        while True:
            for batch in stream:
                yield tuple(tokens([text.encode() for text in batch[name].to_pylist()]) for name in COLUMNS)

    return streamed(), settings.why["low_memory"]


def _meet(folder: Path, rank: int, of: int) -> None:
    (folder / f"warm-{rank}").touch()
    while len(list(folder.glob("warm-*"))) < of:
        time.sleep(0.005)


def train(how: str, path: str, folder: Path, rank: int, of: int, steps: int) -> None:
    import torch

    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches, why = (by_read_table if how == "read_table" else by_legroom)(path, rank, of)
    embed = torch.nn.Embedding(256, WIDTH)
    body = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
    head = torch.nn.Linear(WIDTH, 256)
    model = torch.nn.Sequential(embed, body, head)
    optimizer = torch.optim.AdamW(model.parameters())
    seconds, loss, worked = [], None, 0.0
    warm = steps // 4
    for step in range(warm + steps):
        if step == warm:
            _meet(folder, rank, of)  # while a rank still loads, the others step at another speed
            worked = time.process_time()
        start = time.perf_counter()
        prompt, response = next(batches)
        loss = torch.nn.functional.cross_entropy(model(prompt).flatten(0, 1), response.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    assert loss is not None and bool(loss.isfinite())
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    found = {
        "rate": steps / sum(seconds[warm:]),
        "cpu": (time.process_time() - worked) / steps,
        "swap": int(status["VmSwap"].split()[0]) * 1024,
        "peak": int(status["VmHWM"].split()[0]) * 1024,
        "why": why,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    work, how, path, *rest = sys.argv[1:]
    if work == "hold":
        hold(how, path, Path(rest[0]), rest[1])
    else:
        train(how, path, Path(rest[0]), *map(int, rest[1:]))
    sys.stdout.flush()
    os._exit(0)  # gigabytes need not be taken apart one by one
