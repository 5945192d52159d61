"""The rows to train on, in one of two ways: a stream within a memory limit, or one shared copy for all ranks.

Also which rank takes which rows, and resuming in the middle of an epoch.

A *step* is an optimizer step. Both ways cut an epoch into steps first and a step into batches last. So a run resumes at
the same row also with smaller batches and more accumulation. Rows that do not fill a step of all ranks are left out:
ranks with different numbers of batches would wait for each other forever.
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
from legroom.messages import either
from legroom.records import Settings

COLUMNS = ["prompt", "response"]
SHUFFLED = 4096  # rows that a stream shuffles among themselves

Tensors = dict[str, Any]


class Streamed:
    """Rows read as a stream, in at most ``memory`` bytes: for files larger than memory."""

    low_memory = True
    entry = None  # no shared copy

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
    """Rows of one Arrow copy that all ranks, workers and jobs of this machine map."""

    low_memory = False

    def __init__(self, path: Path, step_rows: int, seed: int, rank: int, world: int) -> None:
        data = legroom.open(path)
        self._rows = TableRows(data)
        self.entry = data.info
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
            raise other_data(
                either(
                    f"their digest was {state.get('digest')} and is {self._digest}",
                    f"校验值原为 {state.get('digest')}，现为 {self._digest}",
                )
            )


def other_data(why: str) -> UsageError:
    """For a checkpoint whose epoch cannot be resumed."""
    return UsageError(
        either("the checkpoint is of an epoch over other rows", "检查点所在的一轮使用的是另外的数据"),
        why=why,
        fix=(
            either(
                "resume with the file, the ranks and batch × accumulation it began with",
                "用开始时的文件、rank 数和 批大小 × 梯度累积 续训",
            ),
            either("or start from scratch: --is_keep_training=False", "或从头训练：--is_keep_training=False"),
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
    """The length of a file and its first rows: what settings are chosen from, without loading the file."""

    def __init__(self, path: Path, read: int = 256) -> None:
        stream = legroom.stream(path, columns=COLUMNS, batch_size=1, format="python", rank=0, world_size=1)
        for field in stream.schema:
            if str(field.type) not in ("string", "large_string", "string_view"):
                raise UnsupportedData(
                    either(f"column {field.name} of {path} is not text", f"{path} 的 {field.name} 列不是文本"),
                    why=either(f"it is {field.type}", f"类型为 {field.type}"),
                    fix=(either("write strings", "请写成字符串"),),
                )
        self._length = len(stream)
        self.first = [row for (row,), _ in zip(stream, range(read), strict=False)]

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, str]:
        return self.first[index % len(self.first)]


def sample() -> DataLoader[Tensors]:
    """For `legroom tune --dataset rows.py:sample`: the rows that make_data.py wrote, as this script batches them."""
    return DataLoader(FirstRows(Path("data/train.parquet")), batch_size=32, collate_fn=Batch(256))
