"""Datasets and collate functions that loaders are compared with; at the top level, so that spawn can send them."""

from __future__ import annotations

import inspect
import random
from collections import namedtuple
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.multiprocessing import reductions
from torch.utils.data import DataLoader, Dataset, IterableDataset, get_worker_info

Point = namedtuple("Point", ["x", "y"])
OUT_OF_ORDER = "in_order" in inspect.signature(DataLoader).parameters  # an argument since torch 2.6


class Rows(Dataset[Any]):
    """Row ``i`` is made by ``kind``."""

    def __init__(self, kind: str = "tensor", count: int = 23) -> None:
        self.kind, self.count = kind, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return KINDS[self.kind](i)


class ManyRows(Rows):
    """The same, many at once."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


def _nested(i: int) -> Any:
    return {
        "image": torch.full((3, 5), float(i)),
        "array": np.arange(4) * i,
        "pair": (i, f"name {i}"),
        "list": [torch.tensor(i), {"deep": np.float32(i / 2)}],
        "point": Point(i, torch.ones(2) * i),
        "bytes": bytes([i]),
        "flag": bool(i % 2),
    }


KINDS = {
    "tensor": lambda i: torch.full((4, 3), i, dtype=torch.float32),
    "int": lambda i: i,
    "float": lambda i: i / 7,
    "text": lambda i: f"row {i}",
    "numpy": lambda i: np.full((2, 2), i, np.int16),
    "numpy scalar": lambda i: np.float64(i),
    "tuple": lambda i: (torch.ones(3) * i, i),
    "namedtuple": lambda i: Point(i, torch.ones(2) * i),
    "nested": _nested,
    "bool": lambda i: torch.tensor([i % 2 == 0]),
    "bfloat16": lambda i: torch.full((3,), i, dtype=torch.bfloat16),
    "complex": lambda i: torch.full((3,), complex(i, -i)),
    "scalar tensor": lambda i: torch.tensor(i),
    "empty": lambda i: torch.empty(0, 3),
    "sliced": lambda i: torch.arange(40).view(5, 8)[:, ::2] + i,
    "transposed": lambda i: (torch.arange(6).view(2, 3) * i).T,
    "nested and random": lambda i: (_nested(i), torch.rand(2), random.random(), np.random.rand()),
    "random": lambda i: (torch.rand(2), random.random(), np.random.rand()),
}


class Stream(IterableDataset[Any]):
    """``count`` numbers, shared out to the workers; it can say where it is."""

    def __init__(self, count: int = 23) -> None:
        self.count, self.at = count, 0

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        step, first = (info.num_workers, info.id) if info else (1, 0)
        start, self.at = self.at, 0
        for i in range(start * step + first, self.count, step):
            self.at = (i - first) // step + 1
            yield torch.full((3,), i)
        self.at = 0


class Remembering(Stream):
    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


class Sized(Stream):
    def __len__(self) -> int:
        return self.count


@dataclass
class Custom:
    inputs: torch.Tensor
    names: list[str]


def custom(samples: list[Any]) -> Custom:
    return Custom(torch.stack([torch.as_tensor(sample) for sample in samples]) + 1, [str(len(samples))])


def as_numpy(samples: list[Any]) -> dict[str, Any]:
    stacked = np.stack([np.asarray(sample) for sample in samples]).repeat(100, 0)
    return {"c": stacked, "fortran": np.asfortranarray(stacked), "every second": stacked[::2], "small": np.arange(3),
            "objects": np.array(["a", None], object), "text": np.array(["abc"] * 200)}  # fmt: skip


def by_default_and_more(samples: list[Any]) -> Any:
    return {"batch": torch.utils.data.default_collate(samples), "count": len(samples)}


def odd_tensors(samples: list[Any]) -> dict[str, Any]:
    base = torch.stack([torch.as_tensor(sample) for sample in samples]).float()
    return {
        "sparse": base.to_sparse(),
        "grad": base.clone().requires_grad_(),
        "parameter": torch.nn.Parameter(base.clone()),
        "channels last": base.reshape(-1, 1, 2, 2)[:4].repeat(1, 3, 1, 1).to(memory_format=torch.channels_last)
        if base.numel() % 4 == 0
        else base,
        "expanded": base[:1].expand(4, *base.shape[1:]),
        "conjugate": torch.complex(base, base).conj(),
        "quantised": torch.quantize_per_tensor(base, 0.1, 0, torch.qint8),
        # torch 2.4 cannot send a meta tensor: its own loader hangs.
        "meta": torch.zeros(3, device="meta" if hasattr(reductions, "rebuild_meta_tensor") else "cpu"),
        "subclass": base.as_subclass(Marked),
        "empty": torch.empty(2, 0, 3),
        "float8": base.to(torch.float8_e4m3fn),
        "uint16": base.to(torch.uint16),
    }


class Marked(torch.Tensor):
    """A tensor type of a user's own."""


def twice(samples: list[Any]) -> dict[str, Any]:
    batch = torch.stack(list(samples))
    return {"one": batch, "same": batch, "list": [batch]}


def mark_worker(worker: int) -> None:
    info = get_worker_info()
    assert info is not None and info.id == worker
    info.dataset.count = 8


class Raises(Rows):
    def __getitem__(self, i: int) -> Any:
        if i == 9:
            raise KeyError("row nine")
        return super().__getitem__(i)


class Sleeps(Rows):
    def __getitem__(self, i: int) -> Any:
        import time

        time.sleep(30 if i == 4 else 0)  # a busy machine may stop the trainer for seconds, too
        return super().__getitem__(i)


class LastFirst(Rows):
    """Its first row takes until the program has another one."""

    def __init__(self, context: Any) -> None:
        super().__init__("int", 12)
        self.overtaken = context.Event()

    def wait(self) -> None:
        self.overtaken.wait(60)

    def __getitem__(self, i: int) -> Any:
        if i == 0:
            self.wait()
        return super().__getitem__(i)


def overtaking(dataset: LastFirst, loader: Any) -> list[int]:
    """The rows of a loader whose batches have one each, in the order in which they come."""
    found = []
    for batch in loader:
        found.append(int(batch))
        dataset.overtaken.set()
    return found


class Dies(Rows):
    """Worker processes kill themselves at row ten."""

    def __init__(self, signal: int, kind: str = "tensor") -> None:
        super().__init__(kind, 40)
        self.signal = signal

    def __getitem__(self, i: int) -> Any:
        import os

        if i == 10:
            os.kill(os.getpid(), self.signal)
        return super().__getitem__(i)


class Ragged(Rows):
    def __getitem__(self, i: int) -> Any:
        return torch.ones(i + 1)


def fails_to_start(worker: int) -> None:
    raise ValueError(f"worker {worker} will not start")
