"""legroom.gpu.find_batch_size: the largest batch that fits, by a few real steps.

Covers: choosing where trials run, asking the search, keeping ranks together, the answer. Does not cover: the search
(search.py), the trials (meter_*.py), splitting an effective batch (split.py), the plot (drawing.py).

Under torch.distributed all ranks try the same batches at the same time and learn of each other's failures after each. A
step that communicates would leave the others waiting when one rank runs out in the middle: let it call the module
inside the DDP wrapper (DDP communicates in forward too, no_sync() or not).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from legroom.errors import DoesNotFit, LegroomError, TrialFailed, UsageError
from legroom.gpu import host_memory
from legroom.gpu.card import import_torch, open_card, why_no_cuda
from legroom.gpu.meter import Meter, Reading, Step
from legroom.gpu.meter_child import ChildMeter
from legroom.gpu.meter_cuda import CudaMeter
from legroom.gpu.meter_fork import ForkMeter
from legroom.gpu.ranks import Ranks
from legroom.gpu.saved import Saved
from legroom.gpu.search import largest, line, next_batch
from legroom.gpu.split import split
from legroom.model.gpu import BatchFound, Trial
from legroom.units import format_size
from legroom.words import say


def find_batch_size(
    step: Step | None = None,
    *,
    max_batch: int | None = None,
    margin: float = 0.05,
    effective_batch: int | None = None,
    isolate: str | None = None,
    worst_case: Any = None,
    device: Any = None,
    keep: Sequence[Any] = (),
) -> BatchFound:
    """The largest batch that fits with ``margin`` to spare; ``step(batch)`` runs one real training step of that size.

    On the CPU each trial runs in a forked child, within what the cgroup leaves.

    Args:
        step: Runs one real training step with a batch of that many samples.
        max_batch: The most to try; None: as far as memory goes.
        margin: The share of the bound to leave free.
        effective_batch: Samples in an optimizer step: the answer divides it, and says the accumulation.
        isolate: ``"module:factory"`` runs each trial in a process of its own, where ``factory()`` gives the step.
        worst_case: Handed to the step as a second argument: the longest sample, for data of different lengths.
        device: The card; None is the current one, or the CPU without any.
        keep: Models and optimizers that get back the state they had: trials are real steps and train.
    """
    _check(step, isolate, margin, max_batch, effective_batch)
    ranks = Ranks()
    ranks.agree(
        max_batch=max_batch or 0, effective_batch=effective_batch or 0, margin=round(margin * 1_000_000)
    )
    most = _most(max_batch, effective_batch, ranks.world)
    with Saved(keep):
        meter = _meter(step, isolate, margin, worst_case, device, keep)
        try:
            trials, bound, notes = search(meter, ranks, margin, most)
        finally:
            meter.close()
    found = largest(trials)
    if found == 0:
        raise _does_not_fit(trials, bound, margin)
    batch, accumulation, note = split(found, effective_batch, ranks.world)
    fixed, slope = line(trials) or (float(trials[-1].peak or 0), 0.0)
    return BatchFound(
        batch=batch,
        largest=found,
        accumulation=accumulation,
        effective_batch=batch * accumulation * ranks.world,
        ranks=ranks.world,
        bound=bound,
        margin=margin,
        trials=tuple(trials),
        fixed=round(fixed),
        per_sample=slope,
        measure=meter.measure,
        notes=tuple(dict.fromkeys([*notes, *([note] if note else []), *_about(trials, found)])),
    )


def search(meter: Meter, ranks: Ranks, margin: float, most: int | None) -> tuple[list[Trial], int, list[str]]:
    """All the trials there are to make, the tightest bound met, and what the meters had to say."""
    trials: list[Trial] = []
    notes: list[str] = []
    bound = cap = 0
    while (batch := next_batch(trials, cap, most, rough=meter.rough)) is not None:
        reading = _together(meter, ranks, batch)
        bound = reading.bound if not trials else min(bound, reading.bound)
        cap = int(bound * (1 - margin))
        trials.append(reading.trial)
        notes += reading.notes
    return trials, bound, notes


def _together(meter: Meter, ranks: Ranks, batch: int) -> Reading:
    """One trial on every rank; what comes back is the same on all of them: the worst."""
    problem: Exception | None = None
    reading = Reading(Trial(batch, False, None), 0)
    try:
        reading = meter.try_batch(batch)
    except Exception as raised:
        problem = raised
    trial = reading.trial
    worst, bound = ranks.least([0 if problem else 2 if trial.fits else 1, reading.bound])
    if worst == 0:
        raise problem or TrialFailed(
            say("another rank's step raised an error at a batch of {batch}", batch=batch),
            why=say("ranks go on together or not at all; that rank says what it was"),
        )
    if ranks.world == 1:
        return reading
    peak, steady, reserved, retries = ranks.most(
        [trial.peak or 0, trial.steady or 0, trial.reserved or 0, trial.retries]
    )
    if worst == 1:
        why = trial.why or say("it did not fit on another rank")
        return replace(
            reading, bound=bound, trial=replace(trial, fits=False, peak=None, why=why, retries=retries)
        )
    same = replace(trial, peak=peak, steady=steady, reserved=reserved or None, retries=retries)
    return replace(reading, bound=bound, trial=same)


def _meter(
    step: Step | None, isolate: str | None, margin: float, worst_case: Any, device: Any, keep: Sequence[Any]
) -> Meter:
    torch = import_torch()
    on_cpu = str(device) == "cpu" or (device is None and why_no_cuda(torch) is not None)
    if on_cpu:
        bound, where = host_memory.room()
        if bound is None:
            raise LegroomError(say("how much memory there is cannot be told here"), why=where)
        if isolate is not None:
            return ChildMeter(isolate, margin, "cpu", allowed=None, worst_case=worst_case, bound=bound)
        if not hasattr(os, "fork"):
            raise UsageError(
                say("a trial on the CPU needs a process of its own"),
                why=say("one that is too large ends in a kill, and this system cannot fork"),
                fix=(say("give isolate='module:factory', whose factory() returns the step"),),
            )
        assert step is not None
        return ForkMeter(step, margin, bound, where, worst_case=worst_case)
    card = open_card(device, say("batches would be tried on it"))
    if isolate is not None:
        fraction = card.fraction()
        allowed = int(fraction * card.torch_size()) if fraction is not None and fraction < 1 else None
        return ChildMeter(isolate, margin, card.name, allowed=allowed, worst_case=worst_case, bound=None)
    assert step is not None
    return CudaMeter(card, step, margin, worst_case=worst_case, keep=keep)


def _check(
    step: object, isolate: str | None, margin: float, max_batch: int | None, effective: int | None
) -> None:
    wrong = None
    if (step is None) == (isolate is None):
        wrong = say("give the step, or isolate='module:factory', and not both")
    elif isolate is None and not callable(step):
        wrong = say("the step is a {kind}, which cannot be called", kind=type(step).__name__)
    elif isolate is not None and not all(isolate.partition(":")):
        wrong = say("isolate={isolate!r} is not of the form module:factory", isolate=isolate)
    elif not 0 <= margin < 1:
        wrong = say("a margin of {margin} is not a share of the memory", margin=margin)
    elif any(value is not None and value < 1 for value in (max_batch, effective)):
        wrong = say("a batch holds at least one sample")
    if wrong is not None:
        raise UsageError(
            say("the batch size cannot be searched for as asked"),
            why=wrong,
            fix=(say("find_batch_size(step, margin=0.05), where step(batch) runs one training step"),),
        )


def _most(max_batch: int | None, effective: int | None, world: int) -> int | None:
    """No batch above this is of use."""
    useful = None if effective is None else max(1, effective // world)
    bounds = [bound for bound in (max_batch, useful) if bound is not None]
    return min(bounds) if bounds else None


def _does_not_fit(trials: Sequence[Trial], bound: int, margin: float) -> DoesNotFit:
    return DoesNotFit(
        say("not even a batch of {batch} fits", batch=min(trial.batch for trial in trials)),
        why=say(
            "there are {bound}, less {margin:.0%} to spare, and the step ran out: {why}",
            bound=format_size(bound), margin=margin, why=trials[-1].why or "",
        ),
        fix=(say("smaller inputs or mixed precision: legroom.gpu.advise says what each frees"),
             say("a lighter optimizer, or its state and the weights spread over ranks (ZeRO, FSDP)"),
             say("see who else is on the card, by legroom.gpu.account() or:\nlegroom doctor")),
    )  # fmt: skip


def _about(trials: Sequence[Trial], found: int) -> list[str]:
    notes = []
    retries = next(trial.retries for trial in trials if trial.batch == found and trial.fits)
    if retries:
        notes.append(
            say(
                "at {found} the allocator had to flush its cache {retries} time(s): a little less runs faster",
                found=found, retries=retries,
            )
        )  # fmt: skip
    failed = min((trial.batch for trial in trials if not trial.fits), default=None)
    if failed is not None and failed - found > max(1, 0.05 * failed):
        notes.append(
            say(
                "{found} fits and {failed} does not; what lies between was not tried",
                found=found,
                failed=failed,
            )
        )
    return notes
