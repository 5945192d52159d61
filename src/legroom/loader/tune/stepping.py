"""A training step, timed on a few real batches.

Covers: calling it, and waiting for what it left running on a GPU. Does not cover: anything about the model.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

from legroom.budget.pace import Step
from legroom.errors import UsageError
from legroom.loader.measure.draw import draw, length
from legroom.loader.tune.clock import Clock
from legroom.words import say

_SECONDS = 1.5
_MOST = 5


def time_step(
    dataset: Any, collate_fn: Callable[[Any], Any] | None, batch_size: int, step: Callable[[Any], Any]
) -> Step:
    """Seconds of one call with a batch. It is the real step: what it changes, it changes. The first call warms up."""
    if collate_fn is None:
        from torch.utils.data import default_collate

        collate_fn = default_collate
    drawn = draw(dataset, length(dataset), together=batch_size, samples=batch_size, seconds=_SECONDS / 3)
    batch = collate_fn([drawn.samples[number % len(drawn.samples)] for number in range(batch_size)])
    laps: list[Clock] = []
    deadline = time.monotonic() + _SECONDS
    while len(laps) < 1 + _MOST and (len(laps) < 2 or time.monotonic() < deadline):
        before = Clock.now()
        try:
            step(batch)
            _synchronize()
        except Exception as problem:  # whatever the user's own code raises
            raise UsageError(
                say("the step failed on a batch of {count}", count=batch_size),
                why=say("{kind}: {text}", kind=type(problem).__name__, text=problem),
                fix=(say("make step(batch) work on one batch of the dataset first"),),
            ) from problem
        laps.append(Clock.now().since(before))
    seconds = statistics.median(lap.undisturbed for lap in laps[1:])
    cpu = statistics.median(lap.cpu for lap in laps[1:])
    return Step(seconds, cpu)


def _synchronize() -> None:
    torch = sys.modules.get("torch")
    if torch is not None and torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
