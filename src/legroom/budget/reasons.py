"""One line for each loader setting, with the number it rests on.

Covers: words for a Choice. Does not cover: making it (choose.py).
"""

from __future__ import annotations

from dataclasses import replace

from legroom.budget.choose import Ask, Choice, most_workers, pace
from legroom.model import Box, Measured, Plan
from legroom.units import format_size
from legroom.words import joined, phrase, say


def milliseconds(seconds: float) -> str:
    """Three figures: ``0.412 ms``, ``11.2 ms``, ``1200 ms``."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} ms"


def reasons(measured: Measured, box: Box, ask: Ask, choice: Choice) -> dict[str, str]:
    """Why each setting is what it is."""
    rung = choice.rung
    lines = {
        "batch_size": _batch(measured, ask, choice),
        "accumulation": _accumulation(ask, choice),
        "num_workers": _workers(measured, ask, choice),
    }
    if rung.workers:
        lines["prefetch_factor"] = _prefetch(measured, choice)
    lines["pin_memory"] = _pin(box, choice)
    return lines


def _batch(measured: Measured, ask: Ask, choice: Choice) -> str:
    batch = choice.rung.batch
    if batch == ask.batch_size:
        return say("batch {batch}: as asked for, {size}", batch=batch, size=_batch_bytes(measured, batch))
    return say(
        "batch {batch} instead of {asked}: {problem}",
        batch=batch, asked=ask.batch_size, problem=_problem(choice.refused),
    )  # fmt: skip


def _batch_bytes(measured: Measured, batch: int) -> str:
    return format_size(measured.batch_bytes * batch // measured.batch_size)


def _accumulation(ask: Ask, choice: Choice) -> str:
    batch, steps = choice.rung.batch, choice.together // choice.rung.batch
    return say(
        "accumulation {steps}: {batch} × {steps} × {ranks} ranks = {effective} samples an optimizer step, kept",
        steps=steps, batch=batch, ranks=ask.ranks, effective=batch * steps * ask.ranks,
    )  # fmt: skip


def _workers(measured: Measured, ask: Ask, choice: Choice) -> str:
    rung, ideal = choice.rung, choice.ideal
    if measured.unsendable is not None:
        return say("workers 0: a batch cannot be sent from a worker ({why})", why=measured.unsendable)
    if rung.workers < ideal.workers:
        return say(
            "workers {workers}: {ideal} would be faster, but {problem}",
            workers=rung.workers, ideal=ideal.workers, problem=_problem(choice.refused),
        )  # fmt: skip
    if not rung.workers:
        return _no_workers(measured, ask, choice)
    sample = milliseconds(measured.worker_seconds)
    if ask.step.seconds:
        head = say(
            "workers {workers}: {sample} a sample against a {step} step of {batch}",
            workers=rung.workers, sample=sample, step=milliseconds(ask.step.seconds), batch=rung.batch,
        )  # fmt: skip
    else:
        head = say("workers {workers}: {sample} a sample", workers=rung.workers, sample=sample)
    return joined((head, _why_no_more(measured, ask, choice)))


def _no_workers(measured: Measured, ask: Ask, choice: Choice) -> str:
    here = milliseconds(pace(measured, choice.rung, choice.cores, ask.step))
    most, bound = most_workers(measured, ask, choice.cores, choice.bounds)
    if not most:
        return say("workers 0: {why}", why=_bound(bound, measured, choice))
    one = milliseconds(pace(measured, replace(choice.rung, workers=1, prefetch=2), choice.cores, ask.step))
    return say("workers 0: a batch every {here} without, every {one} through a worker", here=here, one=one)


_BOUNDS = {
    "cores": phrase("one more would find no core: there are {cores:g} for each rank"),
    "waiting": phrase("{share:.0%} of it is waiting, and four workers a core are the most that is tried"),
    "iterable": phrase("an iterable dataset gives every worker all of it unless it shards itself"),
    "preset": phrase("the preset allows no more"),
    "batches": phrase("an epoch has no more batches"),
    "most": phrase("more are not tried"),
    "unsendable": phrase("a batch cannot be sent from a worker"),
}


def _bound(name: str, measured: Measured, choice: Choice) -> str:
    share = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    return say(_BOUNDS[name], cores=choice.cores, share=share)


def _why_no_more(measured: Measured, ask: Ask, choice: Choice) -> str:
    rung = choice.rung
    most, bound = most_workers(measured, ask, choice.cores, choice.bounds)
    if rung.workers >= most:
        return _bound(bound, measured, choice)
    now = pace(measured, rung, choice.cores, ask.step)
    more = pace(measured, replace(rung, workers=rung.workers + 1), choice.cores, ask.step)
    if ask.step.seconds and now <= ask.step.seconds * 1.05:
        return say("one more would idle")
    return say("one more would gain {share:.0%}", share=max(0.0, 1 - more / now))


def _prefetch(measured: Measured, choice: Choice) -> str:
    rung = choice.rung
    if rung.prefetch < choice.ideal.prefetch:
        return say(
            "prefetch {prefetch}: {ideal} would even out the samples' times, but {problem}",
            prefetch=rung.prefetch, ideal=choice.ideal.prefetch, problem=_problem(choice.refused),
        )  # fmt: skip
    idle = measured.transport.latency_seconds if measured.transport else 0.0
    return say(
        "prefetch {prefetch}: a sample's time varies by {spread:.0%}, a worker asked anew idles {idle}; "
        "{flights} batches in flight",
        prefetch=rung.prefetch, spread=measured.spread, idle=milliseconds(idle),
        flights=rung.workers * rung.prefetch,
    )  # fmt: skip


def _pin(box: Box, choice: Choice) -> str:
    if not box.gpus.cards:
        return say("pin_memory off: no GPU seen")
    if not choice.rung.pin and choice.refused is None:
        return say("pin_memory off: set so")
    if not choice.rung.pin:
        return say("pin_memory off: it takes host RAM, and {problem}", problem=_problem(choice.refused))
    return say(
        "pin_memory on: {size} of host RAM, none of /dev/shm", size=format_size(choice.plan.need.pinned)
    )


def _problem(plan: Plan | None) -> str:
    if plan is None or not plan.problems:
        return say("it does not fit")
    return plan.problems[0].message
