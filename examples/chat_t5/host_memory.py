"""Host memory of this rank by component, measured from the live objects and from /proc.

Model, optimizer and gradients are counted by the storages of their tensors, Arrow data and prefetched batches by the
pages mapped for them. The rest is the difference to what the kernel counts: Python, torch's libraries, the allocator.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from multiprocessing import active_children
from typing import Any

import pyarrow as pa
import torch

from legroom.messages import either
from legroom.units import format_size

PREFETCHED = "/memfd:legroom-batch"


@dataclass
class Pages:
    """Bytes of one process: its proportional share (PSS) in RAM and in swap."""

    data: int = 0
    prefetch: int = 0
    other: int = 0


def components(model: Any = None, optimizer: Any = None, entry: Any = None, batch: Any = None) -> dict[str, int | None]:
    """Bytes by component, now. ``entry``: the shared copy of the rows, ``batch``: the tensors in use."""
    weights = _storages([*model.parameters(), *model.buffers()] if model is not None else [])
    gradients = _storages([one.grad for one in model.parameters()] if model is not None else [])
    states = _storages(_held_by(optimizer) if optimizer is not None else [])
    found: dict[str, int | None] = {
        "model": sum(weights.values()),
        "optimizer": sum(size for key, size in states.items() if key not in weights),
        "data": pa.total_allocated_bytes(),
        "prefetch": sum(_storages(batch.values() if batch is not None else []).values()),
        "accumulation": sum(size for key, size in gradients.items() if key not in weights | states),
    }
    own = _pages(os.getpid(), entry)
    workers = [_pages(child.pid, entry) for child in active_children() if child.pid]
    if own is None or None in workers:
        return found | {"workers": None, "rest": None}
    every = [own, *(one for one in workers if one is not None)]
    in_objects = sum(size or 0 for size in found.values())
    # A batch that lies in a mapped slot is in both sums: count its pages alone.
    slots = sum(one.prefetch for one in every)
    if slots:
        in_objects -= found["prefetch"] or 0
        found["prefetch"] = 0
    found["data"] = (found["data"] or 0) + sum(one.data for one in every)
    found["prefetch"] = (found["prefetch"] or 0) + slots
    found["workers"] = sum(one.other for one in every[1:])
    # Below zero where memory was reserved and not yet written to: then it is not known.
    rest = own.other - in_objects
    return found | {"rest": rest if rest >= 0 else None}


def described(moment: str, sizes: dict[str, int | None]) -> str:
    """One line for the log."""
    names = {
        "model": either("model", "模型"),
        "optimizer": either("optimizer", "优化器"),
        "data": either("Arrow data", "Arrow 数据"),
        "prefetch": either("prefetch", "预取"),
        "accumulation": either("accumulation", "梯度累积"),
        "workers": either("workers", "worker 进程"),
        "rest": either("rest", "其余"),
    }
    unknown = either("unknown", "未知")
    parts = [f"{names[name]} {unknown if size is None else format_size(size)}" for name, size in sizes.items()]
    total = unknown if None in sizes.values() else format_size(sum(size or 0 for size in sizes.values()))
    listed = either(", ", "，").join(parts)
    return either(f"host memory {moment}: {listed}; together {total}", f"内存（{moment}）：{listed}；合计 {total}")


def _storages(tensors: Iterable[Any]) -> dict[int, int]:
    """Bytes on the host by address: tied weights and views into one buffer are counted once."""
    found = {}
    for one in tensors:
        if torch.is_tensor(one) and one.device.type == "cpu":
            storage = one.untyped_storage()
            found[storage.data_ptr()] = storage.nbytes()
    return found


def _held_by(optimizer: Any) -> Iterator[Any]:
    """Its states, and the parameters it steps: under ZeRO these are 32-bit copies of its own."""
    for state in optimizer.state.values():
        yield from state.values()
    for group in optimizer.param_groups:
        yield from group["params"]


def _pages(pid: int, entry: Any) -> Pages | None:
    """From smaps: every mapping's share, by what is mapped. None where it cannot be read."""
    stored = None if entry is None or entry.store is None else os.path.join(entry.store, entry.key, "")
    found, kind = Pages(), "other"
    try:
        with open(f"/proc/{pid}/smaps", encoding="utf-8", errors="replace") as file:
            for line in file:
                name, _, value = line.partition(":")
                if name in ("Pss", "SwapPss"):
                    setattr(found, kind, getattr(found, kind) + int(value.split()[0]) * 1024)
                elif "-" in line.split(maxsplit=1)[0]:  # a mapping's first line: "7f00-7f01 rw-p …"
                    path = line.split(maxsplit=5)[5:]
                    mapped = path[0] if path else ""
                    if stored is not None and mapped.startswith(stored):
                        kind = "data"
                    else:
                        kind = "prefetch" if mapped.startswith(PREFETCHED) else "other"
    except (OSError, IndexError, ValueError):
        return None
    return found
