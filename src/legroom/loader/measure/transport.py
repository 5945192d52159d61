"""Measures what one batch costs on its way from a worker, with one real worker and with two.

The samples are drawn beforehand, so their own cost is left out. The two loaders run one after the other, and their
workers have ended when this returns.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from itertools import pairwise
from typing import Any, Literal

from legroom.loader.measure.private import free_bytes, private_bytes, start_method
from legroom.records import Transport
from legroom.words import say

LoaderKind = Literal["torch", "legroom"]

_SECONDS = 0.35  # for each number of workers
_MOST = 64  # batches
_LEAST = 4
_MOST_HELD = 8  # batches: two of the workers, two of the consumer, and as many again for slots


class _DrawnSamples:
    """A dataset of samples that are already in memory."""

    def __init__(self, members: list[Any]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members) * _MOST

    def __getitem__(self, index: int) -> Any:
        return self._members[index % len(self._members)]


class _MeasuredCollate:
    """The user's collate; returns with each batch the worker's CPU time and private bytes so far."""

    def __init__(self, collate_fn: Callable[[Any], Any]) -> None:
        self._collate = collate_fn
        self._count = 0

    def __call__(self, members: list[Any]) -> tuple[Any, float, int | None]:
        batch = self._collate(members)
        self._count += 1
        # Once, because it takes longer than a small batch. By the second batch the worker's memory has stopped growing.
        held = private_bytes() if self._count == 2 else None
        return batch, time.process_time(), held


def measure_transport(
    members: list[Any],
    collate_fn: Callable[[Any], Any],
    kind: LoaderKind,
    batch_bytes: int,
    collate_seconds: float,
) -> Transport | None:
    """The cost of one batch of these samples; None where no worker can be started to measure it.

    Batches that do not fit several times in free memory are not sent: the measurement must not cause a crash.
    """
    room = free_bytes(kind)
    if "fork" not in multiprocessing.get_all_start_methods() or (
        room is not None and _MOST_HELD * batch_bytes > room
    ):
        return None
    loader = loader_class(kind)
    try:
        alone, both = (_passed(loader, members, collate_fn, workers) for workers in (1, 2))
    except RuntimeError:  # torch raises it where a worker died or could not allocate
        return None
    in_worker = statistics.median(later - earlier for earlier, later in pairwise(alone.stamps))
    return Transport(
        worker_seconds=max(0.0, in_worker - collate_seconds),
        parent_seconds=alone.spent / (len(alone.walls) - 1),
        latency_seconds=max(0.0, statistics.median(alone.walls[1:]) - in_worker),
        two_seconds=both.pace,
        # A worker that is not forked is a new interpreter, which holds at most what this one holds.
        worker_ram=alone.private if start_method() == "fork" else private_bytes(),
        source=say("{count} batches through workers of the {kind} loader", kind=kind,
                   count=len(alone.walls) + len(both.walls)),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _Pass:
    """The measurements of one loader."""

    stamps: list[float]  # the worker's CPU time at each batch
    walls: list[float]  # between batches
    spent: float  # this process's CPU time, from the first batch on
    private: int | None

    @property
    def pace(self) -> float:
        """Seconds per batch in the faster half: in the other half another process may have had the CPU."""
        half = max(1, (len(self.walls) - 1) // 2)
        early, late = self.walls[1 : 1 + half], self.walls[-half:]
        return min(statistics.fmean(early), statistics.fmean(late))


def _passed(kind: Any, members: list[Any], collate_fn: Callable[[Any], Any], workers: int) -> _Pass:
    """Run a loader over samples in memory for a short time."""
    stamps: list[float] = []
    walls: list[float] = []
    private, own = None, 0.0
    with warnings.catch_warnings():
        # Python warns of forking with threads, torch of more workers than cores; the training run shows both.
        warnings.simplefilter("ignore")
        loader = kind(
            _DrawnSamples(members),
            batch_size=len(members),
            collate_fn=_MeasuredCollate(collate_fn),
            num_workers=workers,
            prefetch_factor=1,
            multiprocessing_context="fork",
        )
        batches = iter(loader)
        last = time.perf_counter()
        deadline = last + _SECONDS
        for batch, stamp, held in batches:
            del batch
            now = time.perf_counter()
            if not stamps:
                own = time.process_time()  # the time before was the start
            walls.append(now - last)
            stamps.append(stamp)
            private = held or private
            last = now
            if now > deadline and len(stamps) >= _LEAST:
                break
        spent = time.process_time() - own
        del batches, loader
        gc.collect()  # the workers end when their iterator is collected
    return _Pass(stamps, walls, spent, private)


def loader_class(kind: LoaderKind) -> Any:
    """The class of loader that this kind names."""
    module = "legroom.loader.dataloader" if kind == "legroom" else "torch.utils.data"
    return import_module(module).DataLoader
