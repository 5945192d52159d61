"""Climbing: from no worker upwards by really running, as far as it pays and fits.

Covers: which rungs to try, when to stop, what to keep. Does not cover: running one (loader.climb).

Pure but for the ``run`` it is given. A rung that is predicted not to fit is never run: the edge is looked for from
below, because beyond it is a kill.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from legroom.budget.choose import PREFETCHES, Ask, Choice, Rung, most_workers, plan_of
from legroom.model import Box, Measured
from legroom.words import joined, say

_GAIN = 1.05  # a rung must be this much faster than the last good one to be worth its memory
_PATIENCE = 2  # rungs without a gain before the climb ends: one slow run is no plateau


@dataclass(frozen=True, slots=True)
class Climbed:
    """The last good rung, and the line that tells of the climb."""

    rung: Rung
    why: str


def climb(
    measured: Measured, box: Box, ask: Ask, choice: Choice, run: Callable[[Rung], float | str]
) -> Climbed:
    """Raise workers, then prefetch; ``run`` gives samples a second, or in words why it failed."""
    base = replace(choice.rung, workers=0, prefetch=1)
    most, _ = most_workers(measured, ask, choice.cores, choice.bounds)
    up = [replace(base, workers=workers) for workers in range(most + 1)]
    good, told, failed = _raise(measured, box, ask, up, run)
    if good.workers and not failed:
        deeper = [good, *(replace(good, prefetch=prefetch) for prefetch in PREFETCHES[1:])]
        good, more, _ = _raise(measured, box, ask, deeper, run)
        told += more[1:]
    return Climbed(
        good,
        say("workers {workers}: climbed, {told}", workers=good.workers, told=joined(told)),
    )


def _raise(
    measured: Measured, box: Box, ask: Ask, rungs: list[Rung], run: Callable[[Rung], float | str]
) -> tuple[Rung, list[str], bool]:
    good, best, told, without = rungs[0], 0.0, [], 0
    for rung in rungs:
        name = say("{workers} × {prefetch}", workers=rung.workers, prefetch=rung.prefetch)
        plan = plan_of(measured, box, ask, rung)
        if plan.verdict == "too-big" and rung is not rungs[0]:
            told.append(say("{name} would not fit: {problem}", name=name, problem=plan.problems[0].message))
            return good, told, True
        found = run(rung)
        if isinstance(found, str):
            told.append(say("{name} failed: {why}", name=name, why=found))
            return good, told, True
        told.append(say("{name} gave {rate:.0f} samples/s", name=name, rate=found))
        if found > best * _GAIN:
            good, best, without = rung, found, 0
        else:
            without += 1
            if without >= _PATIENCE:
                break
    return good, told, False
