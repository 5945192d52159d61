"""Loader settings for a measured dataset: fast enough, small enough, the effective batch kept.

Covers: workers, prefetch, pinning, batch and accumulation. Does not cover: threads, allocator and data mode
(around.py), what the person may still do (levers.py), measuring (loader).

Pure. First what would be best if memory were no matter: of all settings that come within a twentieth of the fastest,
the one that takes least. Then down one ladder until it fits: prefetch, pinning, workers, and only then the batch.
The ladder does not depend on the box, so less memory never leads to more batches in flight.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

from legroom.budget.effective import per_rank, smaller_batches
from legroom.budget.pace import Step, batch_seconds, load_seconds, way_seconds
from legroom.budget.predict import fit, need
from legroom.budget.presets import Preset, preset, within
from legroom.budget.settings import usable_cores
from legroom.model import Box, Loader, Measured, Plan, Workload
from legroom.words import say

PREFETCHES = (1, 2, 4)
_SLACK = 1.05  # a twentieth of speed is not worth another worker's memory
_WAITING = 4  # workers a core at the most, where they wait more than they compute
_MOST = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted."""

    batch_size: int
    effective_batch: int | None = None
    ranks: int = 1
    local_ranks: int | None = None  # on this machine; None: all of them
    step: Step = field(default_factory=Step)
    loader_kind: Literal["torch", "legroom"] = "legroom"
    preset: str | None = None
    process_ram: int = 0  # of a training process that does not run yet

    @property
    def here(self) -> int:
        """Ranks on this machine."""
        return self.local_ranks or self.ranks


@dataclass(frozen=True, slots=True)
class Rung:
    """One setting of the loader."""

    batch: int
    workers: int
    prefetch: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The rung taken, what it needs, the one that would have been best, and the pace of both."""

    rung: Rung
    plan: Plan
    ideal: Rung
    refused: Plan | None  # the ideal's plan, where it did not fit
    together: int  # samples of one optimizer step on one rank
    cores: float  # for one rank
    bounds: Preset


def choose(measured: Measured, box: Box, ask: Ask) -> Choice:
    """The settings to take."""
    together = per_rank(ask.batch_size, ask.effective_batch, ask.ranks)
    bounds = preset(ask.preset)
    cores = max(1.0, (usable_cores(box) or 1) / ask.here)
    ideal = _ideal(measured, box, ask, cores, bounds)
    refused = None
    for rung in _ladder(ideal, together):
        plan = plan_of(measured, box, ask, rung)
        if plan.verdict != "too-big":
            break
        refused = refused or plan
    return Choice(rung, plan, ideal, refused, together, cores, bounds)


def workload(measured: Measured, ask: Ask, rung: Rung) -> Workload:
    """What training with these settings does, on every rank of this machine."""
    way = measured.transport
    loader = Loader(
        tensors=tuple(-(-size * rung.batch // measured.batch_size) for size in measured.tensors),
        workers=rung.workers,
        prefetch=rung.prefetch,
        batches=_batches(measured, ask, rung.batch),
        again=not preset(ask.preset).persistent,
        pin_memory=rung.pin,
        kind=ask.loader_kind,
        source=measured.source,
    )
    return Workload(
        processes=ask.here,
        loaders=(loader,),
        worker_ram=(way.worker_ram or 0) if way else 0,
        process_ram=ask.process_ram,
        process_ram_source=say("the process that measured"),
    )


def plan_of(measured: Measured, box: Box, ask: Ask, rung: Rung) -> Plan:
    """Whether a rung fits what the preset allows of the box."""
    return fit(need(workload(measured, ask, rung)), within(box, preset(ask.preset)))


def most_workers(measured: Measured, ask: Ask, cores: float, bounds: Preset) -> tuple[int, str]:
    """Workers beyond which none can pay, and which bound that is: a name for the explanation."""
    if measured.unsendable is not None:
        return 0, "unsendable"
    limits = [(_MOST, "most")]
    waiting = measured.wait_seconds > measured.cpu_seconds
    limits.append((round(cores * _WAITING) if waiting else round(cores), "waiting" if waiting else "cores"))
    if measured.iterable:
        limits.append((1, "iterable"))
    if bounds.most_workers is not None:
        limits.append((bounds.most_workers, "preset"))
    batches = _batches(measured, ask, ask.batch_size)
    if batches is not None:
        limits.append((batches, "batches"))
    return min(limits)


def pace(measured: Measured, rung: Rung, cores: float, step: Step) -> float:
    """Seconds from batch to batch on that rung."""
    return batch_seconds(measured, rung.batch, rung.workers, rung.prefetch, cores, step)


def _batches(measured: Measured, ask: Ask, batch: int) -> int | None:
    return None if measured.rows is None else max(1, -(-measured.rows // (batch * ask.ranks)))


def _ideal(measured: Measured, box: Box, ask: Ask, cores: float, bounds: Preset) -> Rung:
    most, _ = most_workers(measured, ask, cores, bounds)
    pin = bool(box.gpus.cards)
    rungs = [Rung(ask.batch_size, 0, 1, pin)]
    rungs += [
        Rung(ask.batch_size, workers, prefetch, pin)
        for workers in range(1, most + 1)
        for prefetch in PREFETCHES
    ]
    times = {rung: pace(measured, rung, cores, ask.step) for rung in rungs}
    enough = min(times.values()) * _SLACK
    fast = [rung for rung in rungs if times[rung] <= enough]
    if _overlaps(measured, ask):
        fast = [rung for rung in fast if rung.workers] or fast
    return min(
        fast,
        key=lambda rung: (need(workload(measured, ask, rung)).ram, rung.workers, rung.prefetch),
    )


def _overlaps(measured: Measured, ask: Ask) -> bool:
    """Whether a worker is worth having though it is no faster: it works while a step of unknown length runs."""
    known = bool(ask.step.seconds)
    return not known and load_seconds(measured, ask.batch_size) > way_seconds(measured, ask.batch_size)


def _ladder(ideal: Rung, together: int) -> Iterator[Rung]:
    """From the ideal down, each rung taking no more from any pool than the one before."""
    rung = ideal
    yield rung
    for prefetch in reversed(PREFETCHES):
        if prefetch < rung.prefetch:
            rung = replace(rung, prefetch=prefetch)
            yield rung
    if rung.pin:
        rung = replace(rung, pin=False)
        yield rung
    for workers in range(ideal.workers - 1, -1, -1):
        rung = replace(rung, workers=workers)
        yield rung
    for batch in smaller_batches(ideal.batch, together):
        yield replace(rung, batch=batch)
