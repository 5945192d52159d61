"""The rows of a training, read in one of two ways, step by step.

Covers: a stream within a bound of memory (`--ultra_low_mem=True`), one shared copy for all ranks (`False`), which rank
takes which rows, going on amid an epoch. Does not cover: which way is chosen (settings.py), text (text.py).

A *step* is an optimizer step. Both ways cut an epoch into steps first and a step into batches last, so that a training
goes on at the same row though its batches have become smaller and its accumulation longer. What does not fill a step of
all ranks is left out: ranks with different numbers of batches would wait for each other forever.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from text import Batch
from torch.utils.data import DataLoader, Dataset

import legroom
from legroom.errors import UnsupportedData, UsageError
from legroom.model import Settings

COLUMNS = ["prompt", "response"]
SHUFFLED = 4096  # rows that a stream shuffles among themselves

Tensors = dict[str, Any]


class Streamed:
    """Rows that pass by: nothing is held but the bound. Files that are larger than memory."""

    low_memory = True

    def __init__(self, path: Path, step_rows: int, seed: int, rank: int, world: int, memory: int) -> None:
        """``step_rows`` are this rank's rows of one step: each batch of the stream is a whole step."""
        self._stream = legroom.stream(
            path, columns=COLUMNS, batch_size=step_rows, drop_last=True, memory=memory, format="python",
            shuffle_buffer=SHUFFLED, seed=seed, rank=rank, world_size=world, uneven="drop",
        )  # fmt: skip

    def batches(self, epoch: int, done: int, settings: Settings, collate: Batch) -> Iterator[Tensors]:
        """The epoch's batches from where it stands, which is where ``load`` put it or the beginning."""
        self._stream.set_epoch(epoch)
        for rows in self._stream:
            for start in range(0, len(rows), settings.batch_size):
                yield collate(rows[start : start + settings.batch_size])

    def state(self) -> dict[str, Any]:
        """Where it stands, after a step."""
        return self._stream.state_dict()

    def load(self, state: dict[str, Any]) -> None:
        try:
            self._stream.load_state_dict(state)
        except UsageError as problem:
            raise other_data(problem.why) from problem


class Shared:
    """Rows of one Arrow copy that all ranks, workers and trainings of this machine map."""

    low_memory = False

    def __init__(self, path: Path, step_rows: int, seed: int, rank: int, world: int) -> None:
        data = legroom.open(path)
        self._rows = TableRows(data)
        self._digest = data.info.digest
        self._step_rows, self._seed, self._rank, self._world = step_rows, seed, rank, world

    def batches(self, epoch: int, done: int, settings: Settings, collate: Batch) -> Iterator[Tensors]:
        """The epoch's batches after ``done`` steps."""
        order = np.random.default_rng((self._seed, epoch)).permutation(len(self._rows))
        steps = len(order) // (self._world * self._step_rows)
        order = order[: steps * self._world * self._step_rows]
        mine = order.reshape(steps, self._world, self._step_rows)[done:, self._rank].ravel()
        given = settings.loader() | {"persistent_workers": False}  # a loader lives for one epoch
        if not settings.num_workers:
            del given["persistent_workers"]
        return iter(legroom.DataLoader(self._rows, sampler=mine, collate_fn=collate, **given))

    def state(self) -> dict[str, Any]:
        return {"digest": self._digest}

    def load(self, state: dict[str, Any]) -> None:
        if state != self.state():
            raise other_data(f"their digest was {state.get('digest')} and is {self._digest}")


def other_data(why: str) -> UsageError:
    """Of a checkpoint whose epoch cannot be gone on with."""
    return UsageError(
        "the checkpoint lies amid an epoch over other rows",
        why=why,
        fix=(
            "go on with the file, the ranks and batch × accumulation it began with",
            "or begin anew: --is_keep_training=False",
        ),
    )


class TableRows(Dataset[dict[str, str]]):
    """A table's rows one by one. Workers that are not forked attach to the copy again instead of being sent it."""

    def __init__(self, data: Any) -> None:
        self._data, self._table = data, None

    def table(self) -> Any:
        if self._table is None:
            self._table = self._data[next(iter(self._data))]
        return self._table

    def __len__(self) -> int:
        return self.table().num_rows

    def __getitem__(self, index: int) -> dict[str, str]:
        # Not table.take: it may join all chunks of a column into one, a copy of its own in every process.
        return {name: self.table().column(name)[int(index)].as_py() for name in COLUMNS}

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_table": None}


class FirstRows(Dataset[dict[str, str]]):
    """As many rows as a file has, told from its first few: what settings are chosen by, at no cost of memory."""

    def __init__(self, path: Path, read: int = 256) -> None:
        stream = legroom.stream(path, columns=COLUMNS, batch_size=1, format="python", rank=0, world_size=1)
        for field in stream.schema:
            if str(field.type) not in ("string", "large_string", "string_view"):
                raise UnsupportedData(
                    f"column {field.name} of {path} is no text", why=f"it is {field.type}", fix=("write strings",)
                )  # fmt: skip
        self._length = len(stream)
        self.first = [row for (row,), _ in zip(stream, range(read), strict=False)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.first[index % len(self.first)]


def sample() -> DataLoader[Tensors]:
    """For `legroom tune --dataset rows.py:sample`: the rows that make_data.py wrote, as this training takes them."""
    return DataLoader(FirstRows(Path("data/train.parquet")), batch_size=32, collate_fn=Batch(256))
