"""Runs a DataLoader: for its throughput with given settings, or for what it costs to send one batch from a worker.

Also times the training step on a few real batches.
"""

from __future__ import annotations

import gc
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from legroom.advice.choose_settings import Step
from legroom.errors import UsageError
from legroom.loader.measure.import_dataset import is_iterable, length
from legroom.loader.measure.load_timed_samples import Clock, draw_samples
from legroom.loader.measure_process_memory import free_bytes, private_bytes, start_method
from legroom.messages import say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings, LoaderKind
from legroom.records.workload import Transport
from legroom.system.lazy_and_optional_imports import import_lock

_STEP_S = 1.5
_MOST_STEPS = 5
_TRANSPORT_S = 0.35  # for each number of workers
_MOST_BATCHES = 64
_LEAST_BATCHES = 4
_MOST_HELD = 8  # batches: two of the workers, two of the consumer, and as many again for slots


def run_loader(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    settings: CompleteLoaderSettings,
    *,
    step_seconds: float = 0.0,
    seconds: float = 1.0,
    loader: Any = None,
) -> float:
    """Samples per second with a step of ``step_seconds``, measured after the first batch.

    ``loader``: the DataLoader that the dataset was given as, whose worker_init_fn is used.
    """
    import torch

    # In a forked child the other threads of torch's pool do not exist, and their first use would hang.
    torch.set_num_threads(1)
    arguments: dict[str, Any] = {
        "batch_size": settings.batch_size,
        "num_workers": settings.num_workers,
        "collate_fn": collate_fn,
        "worker_init_fn": getattr(loader, "worker_init_fn", None),
    }
    if settings.num_workers:
        arguments["prefetch_factor"] = settings.prefetch_factor
    if not is_iterable(dataset):
        arguments["shuffle"] = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of more workers than cores, which is what is measured
        running = loader_class(settings.loader_kind)(dataset, **arguments)
        batches, started = 0, 0.0
        while True:
            for _ in running:
                if not started:  # the first batch includes the start of the workers
                    started = time.perf_counter()
                    continue
                time.sleep(step_seconds)
                batches += 1
                if time.perf_counter() - started > seconds:
                    break
            if time.perf_counter() - started > seconds:
                break
    return batches * settings.batch_size / (time.perf_counter() - started)


def time_step(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, batch_size: int, step: Callable[[Any], Any]
) -> Step:
    """Time one call with a batch. It is the real step and changes the model. The first call is a warm-up."""
    if collate_fn is None:
        from torch.utils.data import default_collate

        collate_fn = default_collate
    drawn = draw_samples(dataset, length(dataset), together=batch_size, samples=batch_size, seconds=_STEP_S / 3)
    batch = collate_fn([drawn.samples[number % len(drawn.samples)] for number in range(batch_size)])
    laps: list[Clock] = []
    deadline = time.monotonic() + _STEP_S
    while len(laps) < 1 + _MOST_STEPS and (len(laps) < 2 or time.monotonic() < deadline):
        before = Clock.now()
        try:
            step(batch)
            _synchronize()
        except Exception as problem:  # any exception of the user's code
            raise UsageError(
                say("step(batch) failed on a batch of {count}", count=batch_size),
                why=say("{kind}: {text}", kind=type(problem).__name__, text=problem),
                fix=(say("run step(batch) on one batch of the dataset first"),),
            ) from problem
        laps.append(Clock.now().since(before))
    seconds = statistics.median(lap.undisturbed for lap in laps[1:])
    cpu = statistics.median(lap.cpu for lap in laps[1:])
    return Step(seconds, cpu)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()


class _DrawnSamples:
    """A dataset of samples that are already in memory."""

    def __init__(self, members: list[Any]) -> None:
        self._members = members

    def __len__(self) -> int:
        return len(self._members) * _MOST_BATCHES

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
    members: list[Any], collate_fn: Callable[[Any], Any], kind: LoaderKind, batch_bytes: int, collate_seconds: float
) -> Transport | None:
    """The cost of one batch of these samples, with one real worker and with two; None where no worker can be started.

    The samples are loaded already, so their own cost is left out. Batches that do not fit several times in free memory
    are not sent: the measurement must not cause a crash.
    """
    free = free_bytes(kind)
    if "fork" not in multiprocessing.get_all_start_methods() or (free is not None and _MOST_HELD * batch_bytes > free):
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
        deadline = last + _TRANSPORT_S
        for batch, stamp, held in batches:
            del batch
            now = time.perf_counter()
            if not stamps:
                own = time.process_time()  # the time before was the start
            walls.append(now - last)
            stamps.append(stamp)
            private = held or private
            last = now
            if now > deadline and len(stamps) >= _LEAST_BATCHES:
                break
        spent = time.process_time() - own
        del batches, loader
        gc.collect()  # the workers end when their iterator is collected
    return _Pass(stamps, walls, spent, private)


def loader_class(kind: LoaderKind) -> Any:
    """The class of loader that this kind names."""
    if kind == "legroom":
        with import_lock:
            from legroom.loader.dataloader import dataloader

        return dataloader.DataLoader
    from torch.utils.data import DataLoader

    return DataLoader
