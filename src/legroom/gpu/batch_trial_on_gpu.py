"""One trial of a batch size: run a few real steps in this process, on the GPU, and measure the peak.

The bound is what torch could reserve: what it holds plus what is free on the GPU, at most an active limit. The
allocator itself is limited to the bound less the margin, so "fits" means that the step ran within it, fragmentation
included. Trials in child processes: batch_trial_in_child.py. Which batch to try: search_batch_size.py.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from legroom.gpu.oom_retry import is_oom, release_frames
from legroom.gpu.torch_cuda_device import CudaDevice
from legroom.messages import say
from legroom.records.gpu_results import Trial
from legroom.units import format_size

StepFunction = Callable[..., Any]

STEPS_PER_TRIAL = 2  # the first creates the optimizer's state; the second has it and the activations at once
_NEGLIGIBLE = 1 << 20  # bytes left after a failed trial that are not worth a note
_UNEVEN = 0.05  # two steps of one batch size that differ by more did not have inputs of the same length


@dataclass(frozen=True, slots=True)
class TrialResult:
    """One trial, the bytes available for it, and notes for the user."""

    trial: Trial
    bound: int
    notes: tuple[str, ...] = ()


class TrialRunner(Protocol):
    """One way to run trials. ``try_batch`` raises what the step raises, out-of-memory errors excepted."""

    measure: str
    rough: bool  # memory grows only roughly linearly with the batch

    def try_batch(self, batch: int) -> TrialResult:
        """Run the step with that batch."""
        ...

    def close(self) -> None:
        """Restore what trials changed."""
        ...


def run_step(step: StepFunction, batch: int, worst_case: Any) -> None:
    """One step, with the worst case as a second argument if there is one."""
    if worst_case is None:
        step(batch)
    else:
        step(batch, worst_case)


class GpuTrialRunner:
    """Runs trials on one GPU; ``keep`` are models and optimizers whose gradients it may drop."""

    rough = False

    def __init__(
        self, device: CudaDevice, step: StepFunction, margin: float, *, worst_case: Any = None, keep: Sequence[Any] = ()
    ) -> None:
        self.device = device
        self.measure = say("bytes allocated on {device} at the peak of a step", device=device.name)
        self.step = step
        self._worst_case, self._keep = worst_case, keep
        device.warm_up()
        self._fraction = device.fraction()
        self.bound = self._available()
        self._steady = device.allocated()
        device.limit_allocator(int(self.bound * (1 - margin)))

    def _available(self) -> int:
        self._empty_cache()
        free, _ = self.device.memory()
        available = self.device.reserved() + free
        if self._fraction is None:
            return available
        return min(available, int(self._fraction * self.device.total_memory()))

    def try_batch(self, batch: int) -> TrialResult:
        """One trial, starting with an empty cache."""
        device = self.device
        self._empty_cache()
        retries, started = device.retries(), time.monotonic()
        try:
            peaks, reserved = self._run(batch)
        except BaseException as problem:
            kind = is_oom(problem)
            if kind is None:
                self._clean_up()
                raise
            release_frames(problem)
        else:
            self._steady = max(self._steady, device.allocated())
            notes: tuple[str, ...] = ()
            if self._worst_case is None and min(peaks) < (1 - _UNEVEN) * max(peaks) and batch > 2:
                notes = (_uneven_note(batch, peaks, device.retries() > retries),)
            trial = Trial(
                batch,
                fits=True,
                peak=max(peaks),
                steady=device.allocated(),
                reserved=reserved,
                retries=device.retries() - retries,
                seconds=time.monotonic() - started,
            )
            return TrialResult(trial, self.bound, notes)
        left = self._clean_up()
        trial = Trial(
            batch,
            fits=False,
            peak=None,
            retries=device.retries() - retries,
            seconds=time.monotonic() - started,
            why=say("GPU memory ran out") if kind == "gpu" else say("host memory ran out"),
            left_over=left,
        )
        return TrialResult(trial, self.bound, (_left_over_note(batch, left),) if left else ())

    def _run(self, batch: int) -> tuple[list[int], int]:
        """(peak of each step, most reserved)."""
        peaks, reserved = [], 0
        for _ in range(STEPS_PER_TRIAL):
            self.device.reset_peaks()
            run_step(self.step, batch, self._worst_case)
            self.device.synchronize()
            allocated, held = self.device.peaks()
            peaks.append(allocated)
            reserved = max(reserved, held)
        return peaks, reserved

    def _clean_up(self) -> int:
        """Drop gradients and cached blocks; returns bytes still allocated beyond what successful steps keep."""
        for one in self._keep:
            if hasattr(one, "zero_grad"):
                one.zero_grad(set_to_none=True)
        self._empty_cache()
        left = self.device.allocated() - self._steady
        return left if left > _NEGLIGIBLE else 0

    def _empty_cache(self) -> None:
        gc.collect()
        self.device.empty_cache()

    def close(self) -> None:
        """Restore the allocator's limit."""
        self._empty_cache()
        self.device.set_fraction(1.0 if self._fraction is None else self._fraction)


def _left_over_note(batch: int, left: int) -> str:
    return say(
        "{left} stayed allocated after the failed trial of {batch} samples: later trials had that much less",
        left=format_size(left), batch=batch,
    )  # fmt: skip


def _uneven_note(batch: int, peaks: Sequence[int], retried: bool) -> str:
    low, high = format_size(min(peaks)), format_size(max(peaks))
    if retried:
        return say(
            "two steps of {batch} samples took {low} and {high}: short of memory, cuDNN chose algorithms with less "
            "workspace, which are slower",
            batch=batch, low=low, high=high,
        )  # fmt: skip
    return say(
        "two steps of {batch} samples took {low} and {high}: if samples differ in length, pass the longest as "
        "worst_case=",
        batch=batch, low=low, high=high,
    )  # fmt: skip
