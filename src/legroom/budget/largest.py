"""The largest settings that fit a box.

Covers: for a training that does not fit as asked, how far it must come down; for any, the largest batch at its
workers. Does not cover: which settings are fast (tune), the verdict itself (fit.py).

Pure. Comes down in the order that costs least: prefetch, then workers, and only then the batch, with accumulation
up so that the effective batch is kept.
"""

from __future__ import annotations

from dataclasses import replace

from legroom.budget.demand import Batch, Demand, workload_of
from legroom.budget.fit import fit
from legroom.budget.predict import need
from legroom.model import Box, Plan, Settings
from legroom.units import format_size
from legroom.words import say

_MOST = 1 << 20  # samples: above it no batch size is looked for


def fits(demand: Demand, batch: Batch, box: Box) -> bool:
    """Whether nothing that is known speaks against it."""
    return judged(demand, batch, box).verdict != "too-big"


def judged(demand: Demand, batch: Batch, box: Box) -> Plan:
    """The verdict; on our loader with fewer batches on their way, where all that it would like do not fit."""
    verdict = fit(need(workload_of(demand, batch, demand.ranks, demand.ranks)), box)
    if verdict.verdict != "too-big" or demand.kind != "legroom" or demand.squeezed:
        return verdict
    least = judged(replace(demand, squeezed=True), batch, box)
    if least.verdict == "too-big":
        return least
    note = say(
        "at full speed it would take {full} of RAM; it makes do with {less}, and is slower",
        full=format_size(verdict.need.ram), less=format_size(least.need.ram),
    )  # fmt: skip
    return replace(least, notes=(*least.notes, note))


def largest_settings(
    demand: Demand, batch: Batch, box: Box, *, fitting: bool | None = None
) -> Settings | None:
    """What was asked for where it fits, else the nearest that does; None where no setting helps.

    ``fitting``: whether what was asked for fits, where a trial run has told.
    """
    if fitting:
        return _settings(demand, demand, batch.samples, 1)
    for workers, prefetch in _down(demand)[0 if fitting is None else 1 :]:
        lower = _with(demand, workers, prefetch)
        if fits(lower, batch, box):
            return _settings(demand, lower, batch.samples, 1)
    alone = _with(demand, 0, 1)
    for samples in _divisors(batch.samples):
        if fits(alone, batch.of(samples), box):
            return _settings(demand, alone, samples, batch.samples // samples)
    return None


def largest_batch(demand: Demand, batch: Batch, box: Box) -> int | None:
    """The most samples of a batch at these workers and prefetch; None: nothing bounds it, 0: none fits."""
    if fits(demand, batch.of(_MOST), box):
        return None
    low, high = 0, _MOST  # low fits, or is no batch at all; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(demand, batch.of(middle), box):
            low = middle
        else:
            high = middle
    return low


def _down(demand: Demand) -> list[tuple[int, int]]:
    steps = [(w, p) for w in range(demand.workers, 0, -1) for p in range(demand.prefetch, 0, -1)]
    return [*steps, (0, demand.prefetch)]


def _with(demand: Demand, workers: int, prefetch: int) -> Demand:
    val = demand.val_workers
    return replace(
        demand, workers=workers, prefetch=prefetch, val_workers=None if val is None else min(val, workers)
    )


def _divisors(samples: int) -> list[int]:
    """Smaller batches that accumulate to the same number of samples, largest first."""
    return [part for part in range(samples // 2, 0, -1) if samples % part == 0]


def _settings(asked: Demand, chosen: Demand, samples: int, accumulation: int) -> Settings:
    why = {}
    if chosen.prefetch != asked.prefetch and chosen.workers:
        why["prefetch_factor"] = say(
            "prefetch {new} instead of {old}: fewer batches in flight",
            new=chosen.prefetch,
            old=asked.prefetch,
        )
    if chosen.workers != asked.workers:
        why["num_workers"] = say(
            "{new} workers instead of {old}: each holds its own batches",
            new=chosen.workers,
            old=asked.workers,
        )
    if accumulation > 1:
        why["batch_size"] = say(
            "batch {new} × accumulation {times} instead of {old}: the same effective batch",
            new=samples, times=accumulation, old=samples * accumulation,
        )  # fmt: skip
    return Settings(
        batch_size=samples,
        accumulation=accumulation,
        ranks=chosen.ranks,
        num_workers=chosen.workers,
        prefetch_factor=chosen.prefetch if chosen.workers else None,
        persistent_workers=chosen.workers > 0,
        pin_memory=chosen.pin_memory,
        loader_kind=chosen.kind,
        why=why,
    )
