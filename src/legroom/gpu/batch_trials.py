"""Trying a batch: what every way of doing it has in common.

Covers: the protocol, and a trial with the bound it was held against. Does not cover: the ways: in this process, on a
card (meter_cuda.py), in a forked child (meter_fork.py), in a fresh child (meter_child.py).
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from legroom.gpu.cuda_device import CudaDevice
from legroom.gpu.oom import is_oom, release_frames
from legroom.model.gpu import Trial
from legroom.units import format_size
from legroom.words import say

STEPS_PER_TRIAL = (
    2  # of one trial: the first makes the optimizer's state, the second has it and the activations at once
)
StepFunction = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial, the bytes there were for it, and what else its meter has to say."""

    trial: Trial
    bound: int
    notes: tuple[str, ...] = ()


class TrialRunner(Protocol):
    """Somebody who can try a batch. What a step raises, other than for memory, comes out of ``try_batch``."""

    measure: str
    rough: bool  # memory grows with the batch only roughly in a line

    def try_batch(self, batch: int) -> TrialResult:
        """Run the step with that batch; never raises for want of memory."""
        ...

    def close(self) -> None:
        """Put everything back."""
        ...


def run_step(step: StepFunction, batch: int, worst_case: Any) -> None:
    """One step, at the worst case where one was named."""
    if worst_case is None:
        step(batch)
    else:
        step(batch, worst_case)


_NOTHING = 1 << 20  # left over and not worth a word
_RAGGED = 0.05  # two steps of one batch that differ by more have not seen the same data


class GpuTrialRunner:
    """Tries batches on one card; ``keep`` are models and optimizers whose gradients it may drop."""

    rough = False

    def __init__(
        self,
        card: CudaDevice,
        step: StepFunction,
        margin: float,
        *,
        worst_case: Any = None,
        keep: Sequence[Any] = (),
    ) -> None:
        self.card = card
        self.measure = say("bytes allocated on {device} at the peak of a step", device=card.name)
        self._step, self._worst_case, self._keep = step, worst_case, keep
        card.warm_up()
        self._fraction = card.fraction()
        self.bound = self._room()
        self._cap = int(self.bound * (1 - margin))
        self._steady = card.allocated()
        card.set_allowed(self._cap)

    def _room(self) -> int:
        gc.collect()
        self.card.empty_cache()
        free, _ = self.card.room()
        could = self.card.reserved() + free
        return could if self._fraction is None else min(could, int(self._fraction * self.card.torch_size()))

    def use(self, step: StepFunction) -> None:
        """Try this step from now on."""
        self._step = step

    def try_batch(self, batch: int) -> TrialResult:
        """One trial, from an empty cache."""
        card, notes = self.card, []
        gc.collect()
        card.empty_cache()
        retries, started, peaks = card.retries(), time.monotonic(), []
        reserved = 0
        try:
            for _ in range(STEPS_PER_TRIAL):
                card.reset_peaks()
                run_step(self._step, batch, self._worst_case)
                card.synchronize()
                allocated, held = card.peaks()
                peaks.append(allocated)
                reserved = max(reserved, held)
        except BaseException as problem:
            kind = is_oom(problem)
            if kind is None:
                self._clean_up()
                raise
            release_frames(problem)
            why = say("the card's memory ran out") if kind == "gpu" else say("the host's memory ran out")
        else:
            self._steady = max(self._steady, card.allocated())
            if self._worst_case is None and min(peaks) < (1 - _RAGGED) * max(peaks) and batch > 2:
                notes.append((_elastic if card.retries() > retries else _ragged)(batch, peaks))
            trial = Trial(
                batch,
                True,
                max(peaks),
                card.allocated(),
                reserved,
                card.retries() - retries,
                time.monotonic() - started,
            )
            return TrialResult(trial, self.bound, tuple(notes))
        left = self._clean_up()
        if left:
            notes.append(
                say(
                    "{left} stayed allocated after the failed trial of {batch}: later trials had that much less",
                    left=format_size(left), batch=batch,
                )
            )  # fmt: skip
        trial = Trial(
            batch, False, None, None, None, card.retries() - retries, time.monotonic() - started, why, left
        )
        return TrialResult(trial, self.bound, tuple(notes))

    def _clean_up(self) -> int:
        """Drop gradients and cached blocks; gives the bytes that stay though no earlier step needed them."""
        for one in self._keep:
            if hasattr(one, "zero_grad"):
                one.zero_grad(set_to_none=True)
        gc.collect()
        self.card.empty_cache()
        left = self.card.allocated() - self._steady
        return left if left > _NOTHING else 0

    def close(self) -> None:
        """The allocator's limit as it was."""
        gc.collect()
        self.card.empty_cache()
        self.card.set_fraction(1.0 if self._fraction is None else self._fraction)


def _elastic(batch: int, peaks: Sequence[int]) -> str:
    return say(
        "two steps of {batch} samples took {low} and {high}: with memory short, cuDNN did with less work space, "
        "which is slower",
        batch=batch, low=format_size(min(peaks)), high=format_size(max(peaks)),
    )  # fmt: skip


def _ragged(batch: int, peaks: Sequence[int]) -> str:
    return say(
        "two steps of {batch} samples took {low} and {high}: where samples differ in length, give the longest as "
        "worst_case=",
        batch=batch, low=format_size(min(peaks)), high=format_size(max(peaks)),
    )  # fmt: skip
