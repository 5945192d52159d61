"""legroom.gpu.find_batch_size: search for the largest batch that fits, by a few real training steps.

Peak memory grows linearly with the batch. Two small trials give the line, and the line gives the top; but the allocator
needs a little more than what is allocated. So the answer is always a batch that was tried, and the search narrows the
gap between what fits and what does not to 2 %.

Under torch.distributed all ranks try the same batches at the same time and exchange the results after each. A step that
communicates would leave the other ranks waiting if one runs out of memory in the middle: let it call the module inside
the DDP wrapper (DDP communicates in forward too, even under no_sync()).
"""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.errors import DoesNotFit, LegroomError, TrialFailed, UsageError
from legroom.gpu.batch_trial_in_child import ForkTrialRunner, SubprocessTrialRunner
from legroom.gpu.batch_trial_on_gpu import GpuTrialRunner, StepFunction, TrialResult, TrialRunner
from legroom.gpu.rank_consensus import RankConsensus
from legroom.gpu.torch_cuda_device import import_torch, open_device, why_no_cuda
from legroom.messages import say
from legroom.probe.ram_swap_and_pressure import free_memory
from legroom.records.gpu_results import BatchFound, Trial
from legroom.system.argument_checks import check_arguments, check_integer
from legroom.units import format_size

MOST_TRIALS = 6
_FIRST = 2  # batch norm rejects a single sample
_SECOND_SHARE = 0.4  # the second trial aims at this share of the cap, judging by the first alone
# Allocators fragment memory: in three training runs on an H200 the fullest used 0.88, 0.93 and 0.94 of the cap.
_TARGETS = (0.92, 0.88, 0.85, 0.8)  # share of the cap that the peak is aimed at: first, and after each failure
_HOST_TARGET = 0.985
_CLIMB = 0.65  # of the way to the top, once the first target fits
_WORTH_A_TRIAL = 1.05  # times the largest that fits: a smaller gain is not worth one of six trials
_ELASTIC = 1.2  # times the top: tried where a step at the top fitted after the allocator flushed its cache
_FAR = 8  # beyond this many times the largest measured batch a line is extrapolated too far:
_SHORT_OF_TOP = 0.9  # then a trial here improves it first,
_ROUGH_FAR, _ROUGH_SHORT = 1.4, 0.8  # and the same where memory is only roughly linear
_BEYOND_FALL = 2  # times the largest batch: so far proportion is safe once memory has fallen with the batch
_WRONG_LINE = 0.6  # of the smallest failure: used instead of a line that failed twice
_CLOSE_ENOUGH = 0.02
_APART = 0.7  # points closer together than this do not define a line: noise would
_GROWTH = 256
_MOST_STEPS = 2  # times the fewest accumulation steps, to divide the effective batch evenly


def find_batch_size(
    step: StepFunction | None = None,
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

    On the CPU each trial runs in a forked child, within the memory that the cgroup leaves.

    Args:
        step: Runs one real training step with a batch of that many samples.
        max_batch: The largest batch to try; None: as far as memory goes.
        margin: The share of the available memory to leave free.
        effective_batch: Samples per optimizer step. The answer divides it and includes the gradient accumulation.
        isolate: ``"module:factory"`` runs each trial in its own process, where ``factory()`` returns the step.
        worst_case: Passed to the step as a second argument: the longest sample, for data of different lengths.
        device: The GPU; None is the current one, or the CPU if there is none.
        keep: Models and optimizers whose state is restored afterwards: trials are real steps and train.
    """
    check_arguments(find_batch_size, locals())
    _check(step, isolate, margin, max_batch, effective_batch, keep)
    ranks = RankConsensus()
    ranks.require_equal(
        max_batch=max_batch or 0, effective_batch=effective_batch or 0, margin=round(margin * 1_000_000)
    )
    _require_divisible(effective_batch, ranks.world_size)
    most = _most_useful(max_batch, effective_batch, ranks.world_size)
    with SavedState(keep):
        runner = _runner(step, isolate, margin, worst_case, device, keep)
        try:
            trials, bound, notes = run_trials(runner, ranks, margin, most)
        finally:
            runner.close()
    found = largest_fitting(trials)
    if found == 0:
        raise _does_not_fit(trials, bound, margin)
    batch, accumulation, note = split_effective_batch(found, effective_batch, ranks.world_size)
    fixed, slope = fit_line(trials) or (float(trials[-1].peak or 0), 0.0)
    return BatchFound(
        batch=batch,
        largest=found,
        accumulation=accumulation,
        effective_batch=batch * accumulation * ranks.world_size,
        ranks=ranks.world_size,
        bound=bound,
        margin=margin,
        trials=tuple(trials),
        fixed=round(fixed),
        per_sample=slope,
        measure=runner.measure,
        notes=tuple(dict.fromkeys([*notes, *([note] if note else []), *_notes(trials, found)])),
    )


def _check(
    step: object, isolate: str | None, margin: float, max_batch: int | None, effective: int | None, keep: Sequence[Any]
) -> None:
    wrong = None
    if (step is None) == (isolate is None):
        wrong = say("exactly one of step and isolate='module:factory' is needed")
    elif isolate is not None and not all(isolate.partition(":")):
        wrong = say("isolate must have the form 'module:factory' (got {isolate!r})", isolate=isolate)
    elif not 0 <= margin < 1:
        wrong = say("margin must be at least 0 and below 1 (got {margin})", margin=margin)
    elif lacking := [type(one).__name__ for one in keep if not hasattr(one, "state_dict")]:
        wrong = say("keep must be a list of models and optimizers: a {kind} has no state_dict()", kind=lacking[0])
    for name, value in (("max_batch", max_batch), ("effective_batch", effective)):
        if value is not None:
            check_integer(name, value, 1)
    if wrong is not None:
        raise UsageError(
            say("invalid arguments for find_batch_size"),
            why=wrong,
            fix=(say("find_batch_size(step, margin=0.05), where step(batch) runs one training step"),),
        )


def _most_useful(max_batch: int | None, effective: int | None, world_size: int) -> int | None:
    """No larger batch is of use."""
    per_rank = None if effective is None else max(1, effective // world_size)
    return min((one for one in (max_batch, per_rank) if one is not None), default=None)


def _runner(
    step: StepFunction | None, isolate: str | None, margin: float, worst_case: Any, device: Any, keep: Sequence[Any]
) -> TrialRunner:
    torch = import_torch()
    on_cpu = str(device) == "cpu" or (device is None and why_no_cuda(torch) is not None)
    if on_cpu:
        bound, source = free_memory()
        if bound is None:
            raise LegroomError(say("the free memory of this machine is unknown"), why=source)
        if isolate is not None:
            return SubprocessTrialRunner(isolate, margin, "cpu", allowed=None, worst_case=worst_case, bound=bound)
        if not hasattr(os, "fork"):
            raise UsageError(
                say("trials on the CPU need a process of their own"),
                why=say("a trial that is too large is killed, and this system cannot fork"),
                fix=(say("pass isolate='module:factory', where factory() returns the step"),),
            )
        assert step is not None
        return ForkTrialRunner(step, margin, bound, source, worst_case=worst_case)
    gpu = open_device(device, say("try batch sizes on the GPU"))
    if isolate is not None:
        fraction = gpu.fraction()
        allowed = int(fraction * gpu.total_memory()) if fraction is not None and fraction < 1 else None
        return SubprocessTrialRunner(isolate, margin, gpu.name, allowed=allowed, worst_case=worst_case, bound=None)
    assert step is not None
    return GpuTrialRunner(gpu, step, margin, worst_case=worst_case, keep=keep)


def run_trials(
    runner: TrialRunner, ranks: RankConsensus, margin: float, most: int | None
) -> tuple[list[Trial], int, list[str]]:
    """Every trial of the search, the smallest bound, and the runner's notes."""
    trials: list[Trial] = []
    notes: list[str] = []
    bound = cap = 0
    while (batch := next_batch(trials, cap, most, rough=runner.rough)) is not None:
        result = try_on_all_ranks(runner, ranks, batch)
        bound = result.bound if not trials else min(bound, result.bound)
        cap = int(bound * (1 - margin))
        trials.append(result.trial)
        notes += result.notes
    return trials, bound, notes


def try_on_all_ranks(runner: TrialRunner, ranks: RankConsensus, batch: int) -> TrialResult:
    """One trial on every rank; the result, the worst of all, is the same on each."""
    problem: Exception | None = None
    result = TrialResult(Trial(batch, False, None), 0)
    try:
        result = runner.try_batch(batch)
    except Exception as raised:
        problem = raised
    trial = result.trial
    worst, bound = ranks.minimum([0 if problem else 2 if trial.fits else 1, result.bound])
    if worst == 0:
        raise problem or TrialFailed(
            say("the step raised an error on another rank, at a batch of {batch}", batch=batch),
            why=say("all ranks stop together; see the log of that rank"),
        )
    if ranks.world_size == 1:
        return result
    peak, steady, reserved, retries = ranks.maximum(
        [trial.peak or 0, trial.steady or 0, trial.reserved or 0, trial.retries]
    )
    if worst == 1:
        why = trial.why or say("it did not fit on another rank")
        return replace(result, bound=bound, trial=replace(trial, fits=False, peak=None, why=why, retries=retries))
    same = replace(trial, peak=peak, steady=steady, reserved=reserved or None, retries=retries)
    return replace(result, bound=bound, trial=same)


def _does_not_fit(trials: Sequence[Trial], bound: int, margin: float) -> DoesNotFit:
    return DoesNotFit(
        say("not even a batch of {batch} fits", batch=min(trial.batch for trial in trials)),
        why=say(
            "{bound} is available, {margin:.0%} of it kept free; {why}",
            bound=format_size(bound), margin=margin, why=trials[-1].why or "",
        ),
        fix=(say("use smaller inputs or mixed precision: legroom.gpu.advise estimates what each frees"),
             say("use an optimizer with less state, or shard state and weights over ranks (ZeRO, FSDP)"),
             say("see what else uses the GPU, with legroom.gpu.account() or:\nlegroom doctor")),
    )  # fmt: skip


def _notes(trials: Sequence[Trial], found: int) -> list[str]:
    notes = []
    retries = next(trial.retries for trial in trials if trial.batch == found and trial.fits)
    if retries:
        notes.append(
            say(
                "at a batch of {found} the allocator had to flush its cache (retries: {retries}): a slightly smaller "
                "batch runs faster",
                found=found, retries=retries,
            )
        )  # fmt: skip
    failed = min((trial.batch for trial in trials if not trial.fits), default=None)
    if failed is not None and failed - found > max(1, 0.05 * failed):
        notes.append(say("{found} fits and {failed} does not; none between was tried", found=found, failed=failed))
    return notes


# The search: a pure function of the trials made so far.


def next_batch(trials: Sequence[Trial], cap: int, most: int | None = None, *, rough: bool = False) -> int | None:
    """The batch to try next, None when the search is done; ``cap`` is the highest peak allowed.

    ``rough``: malloc on the host may keep or return freed memory, so a line is only a hint.
    """
    if not trials:
        return _FIRST if most is None else min(_FIRST, most)
    low = largest_fitting(trials)
    high = min((trial.batch for trial in trials if not trial.fits), default=None)
    if low == 0:
        return None if high == 1 or len(trials) >= MOST_TRIALS else max(1, (high or 2) // 2)
    if len(trials) >= MOST_TRIALS or low == most:
        return None
    wanted = _larger(trials, low, cap, rough) if high is None else _between(trials, low, high, cap)
    if wanted is None:
        return None
    wanted = max(low + 1, wanted)
    return wanted if most is None else min(wanted, most)


def largest_fitting(trials: Sequence[Trial]) -> int:
    """The largest batch that fitted; 0: none did."""
    return max((trial.batch for trial in trials if trial.fits), default=0)


def fit_line(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """(fixed bytes, bytes per sample) of the line through the largest batch and the next one well below it."""
    known = sorted({trial.batch: trial.peak for trial in trials if trial.peak is not None}.items())
    if len(known) < 2:
        return None
    top, peak = known[-1]
    lower = [point for point in known[:-1] if point[0] <= _APART * top] or known[:1]
    batch, at = lower[-1]
    slope = (peak - at) / (top - batch)
    return peak - slope * top, slope


def _larger(trials: Sequence[Trial], low: int, cap: int, rough: bool) -> int | None:
    """The next batch where none has failed yet."""
    top = _top(trials, cap)
    if rough and len(trials) > 1 and not _plausible_line(trials):
        top = _in_proportion(trials, low, cap)
    if top is None:
        if len(trials) > 1:  # more samples take no more memory
            return low * _FAR
        only = next(trial for trial in trials if trial.fits)
        steady, peak = only.steady or 0, only.peak or 0
        each = max(1.0, (peak - steady) / low)  # counts workspace that does not grow as if it did
        return int(min(max(low * 2, _SECOND_SHARE * (cap - steady) / each), low * _GROWTH))
    if top - low <= max(1.0, _CLOSE_ENOUGH * top):
        if _fitted_by_flushing(trials, low):
            return int(top * _ELASTIC)
        # One more sample may still fit, and it is a large share of a small batch.
        return low + 1 if top >= low + 1 and low < 1 / _CLOSE_ENOUGH else None
    far, short = (_ROUGH_FAR, _ROUGH_SHORT) if rough else (_FAR, _SHORT_OF_TOP)
    if top > far * low and not (rough and _fell(trials, low) and top <= _BEYOND_FALL * low):
        return int(top * short)
    if rough:
        # A failing trial there is a killed process: one step, only as far as the line is certain.
        return int(top * _HOST_TARGET)
    near = int(_top(trials, cap, _TARGETS[0]) or top)
    return near if near > _WORTH_A_TRIAL * low else int(low + _CLIMB * (top - low))


def _between(trials: Sequence[Trial], low: int, high: int, cap: int) -> int | None:
    """The next batch where ``low`` fits and ``high`` failed."""
    if high - low <= max(1.0, _CLOSE_ENOUGH * high):
        return None
    at_low, at_high = _peak_at(trials, low), _peak_at(trials, high)
    if at_low is not None and at_high is not None and at_low <= cap < at_high:
        # The larger step ran to its end, only above the cap: a line between the two says where the cap is.
        reached = low + (high - low) * (cap - at_low) / (at_high - at_low)
        return int(reached * _HOST_TARGET) if reached * _HOST_TARGET >= low + max(1, _CLOSE_ENOUGH * low) else None
    if low >= 0.85 * high:
        return (low + high) // 2
    top = _top(trials, cap)
    if top is None:  # a single point: the geometric mean
        return min(high - 1, int((low * high) ** 0.5))
    failures = sum(1 for trial in trials if not trial.fits)
    if failures > 1 and high > _FAR * low:
        return int(high * _WRONG_LINE)
    target = int(_top(trials, cap, _TARGETS[min(failures, len(_TARGETS) - 1)]) or top)
    if target <= low:
        # More has fitted than the target: follow the line itself, if it ends short of the failure.
        target = int(top * _HOST_TARGET)
        target = target if low < target < high * _HOST_TARGET else (low + high) // 2
    return min(high - 1, target)


def _top(trials: Sequence[Trial], cap: int, share: float = 1.0) -> float | None:
    """The batch at which the line reaches that share of the cap; None: no line, or it does not rise."""
    found = fit_line(trials)
    if found is None or found[1] <= 0:
        return None
    fixed, slope = found
    return max(1.0, (share * cap - fixed) / slope)


def _plausible_line(trials: Sequence[Trial]) -> bool:
    """Whether the line's fixed part is between 0 and the lowest peak.

    glibc keeps freed blocks of up to 32 MB in its heap, with holes, and maps larger ones separately. Where a larger
    batch brings a model's blocks over that size, it takes less memory: on a CPU 330 MB at 60 samples and 174 at 66. A
    line through both sides is meaningless.
    """
    fixed, _ = fit_line(trials) or (-1.0, 0.0)
    return 0 <= fixed <= min(trial.peak for trial in trials if trial.peak is not None)


def _in_proportion(trials: Sequence[Trial], low: int, cap: int) -> float:
    """The batch at which ``low``'s bytes per sample reach the cap: safe whenever there is a fixed part."""
    return low * cap / max(1, _peak_at(trials, low) or 1)


def _peak_at(trials: Sequence[Trial], batch: int) -> int | None:
    return next((trial.peak for trial in trials if trial.batch == batch), None)


def _fell(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest batch took less than a smaller one: its blocks are mapped, as larger ones will be."""
    peaks = {trial.batch: trial.peak or 0 for trial in trials if trial.fits}
    return peaks[low] < max(peaks.values())


def _fitted_by_flushing(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest step fitted only after the allocator flushed its cache.

    cuDNN takes the fastest algorithm whose workspace fits. Convolutions without TF32 on an H200 took 22 MB per sample
    up to 300 samples, where the line ends, and 16 MB at 375, which fitted too: the line shows the comfortable size.
    """
    return any(trial.fits and trial.retries and trial.batch == low for trial in trials)


# The effective batch.


def _require_divisible(effective: int | None, ranks: int) -> None:
    if effective is not None and effective % ranks:
        raise UsageError(
            say("an effective batch of {effective} is not possible", effective=effective),
            why=say("it is not divisible by {ranks} ranks", ranks=ranks),
            fix=(say("use {near}", near=max(ranks, effective // ranks * ranks)),),
        )


def split_effective_batch(largest: int, effective: int | None, ranks: int) -> tuple[int, int, str | None]:
    """(batch, accumulation, note) with batch × accumulation × ranks = effective, or a note with what it is instead."""
    if effective is None:
        return largest, 1, None
    _require_divisible(effective, ranks)
    per_rank = effective // ranks
    fewest = -(-per_rank // largest)
    for steps in range(fewest, min(per_rank, _MOST_STEPS * fewest) + 1):
        if per_rank % steps == 0:
            return per_rank // steps, steps, None
    batch = -(-per_rank // fewest)
    note = say(
        "no batch up to {largest} divides {per_rank} samples per rank evenly: {steps} steps of {batch} make {made} "
        "instead of {effective}",
        largest=largest, per_rank=per_rank, steps=fewest, batch=batch, made=batch * fewest * ranks, effective=effective,
    )  # fmt: skip
    return batch, fewest, note


# What trials must not change.


class SavedState:
    """``with SavedState([model, optimizer]):`` restores both, and torch's random state, at the end.

    State is whatever state_dict() holds: a data loader's position, for one, is not restored.
    """

    def __init__(self, keep: Sequence[Any]) -> None:
        self._keep = list(keep)
        self._states: list[Any] = []
        self._random: Any = None
        self._random_on_gpus: list[Any] = []

    def __enter__(self) -> SavedState:
        if self._keep:
            import torch

            self._states = [_copy_to_host(one.state_dict()) for one in self._keep]
            self._random = torch.get_rng_state()
            if torch.cuda.is_initialized():
                self._random_on_gpus = torch.cuda.get_rng_state_all()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            return
        import torch

        for one, state in zip(self._keep, self._states, strict=True):
            one.load_state_dict(state)
            if hasattr(one, "zero_grad"):
                one.zero_grad(set_to_none=True)
        torch.set_rng_state(self._random)
        if self._random_on_gpus:
            torch.cuda.set_rng_state_all(self._random_on_gpus)
        self._states.clear()


def _copy_to_host(value: Any) -> Any:
    """A copy with every tensor in host memory, so that it takes no GPU memory."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        copied = OrderedDict((key, _copy_to_host(one)) for key, one in value.items())
        if hasattr(value, "_metadata"):  # the versions of a model's modules, which load_state_dict looks at
            copied._metadata = value._metadata  # type: ignore[attr-defined]
        return copied
    if isinstance(value, list):
        return [_copy_to_host(one) for one in value]
    return copy.deepcopy(value)
