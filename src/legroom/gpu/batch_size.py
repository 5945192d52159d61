"""legroom.gpu.find_batch_size: the largest batch that fits, by a few real steps.

Covers: choosing where trials run, asking the search, keeping ranks together, the answer. Does not cover: the search
(search.py), the trials (meter_*.py), splitting an effective batch (split.py), the plot (drawing.py).

Under torch.distributed all ranks try the same batches at the same time and learn of each other's failures after each. A
step that communicates would leave the others waiting when one rank runs out in the middle: let it call the module
inside the DDP wrapper (DDP communicates in forward too, no_sync() or not).
"""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from legroom.errors import DoesNotFit, LegroomError, TrialFailed, UsageError
from legroom.gpu.batch_trials import GpuTrialRunner, StepFunction, TrialResult, TrialRunner
from legroom.gpu.cuda_device import import_torch, open_device, why_no_cuda
from legroom.gpu.rank_consensus import RankConsensus
from legroom.gpu.trial_processes import ForkTrialRunner, SubprocessTrialRunner
from legroom.model.gpu import BatchFound, Trial
from legroom.probe.memory import free_memory
from legroom.units import format_size
from legroom.words import say


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
    ranks = RankConsensus()
    ranks.agree(
        max_batch=max_batch or 0, effective_batch=effective_batch or 0, margin=round(margin * 1_000_000)
    )
    most = _most(max_batch, effective_batch, ranks.world)
    with SavedState(keep):
        meter = _meter(step, isolate, margin, worst_case, device, keep)
        try:
            trials, bound, notes = run_trials(meter, ranks, margin, most)
        finally:
            meter.close()
    found = largest_fitting(trials)
    if found == 0:
        raise _does_not_fit(trials, bound, margin)
    batch, accumulation, note = split_effective_batch(found, effective_batch, ranks.world)
    fixed, slope = fit_line(trials) or (float(trials[-1].peak or 0), 0.0)
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


def run_trials(
    meter: TrialRunner, ranks: RankConsensus, margin: float, most: int | None
) -> tuple[list[Trial], int, list[str]]:
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


def _together(meter: TrialRunner, ranks: RankConsensus, batch: int) -> TrialResult:
    """One trial on every rank; what comes back is the same on all of them: the worst."""
    problem: Exception | None = None
    reading = TrialResult(Trial(batch, False, None), 0)
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
    step: StepFunction | None,
    isolate: str | None,
    margin: float,
    worst_case: Any,
    device: Any,
    keep: Sequence[Any],
) -> TrialRunner:
    torch = import_torch()
    on_cpu = str(device) == "cpu" or (device is None and why_no_cuda(torch) is not None)
    if on_cpu:
        bound, where = free_memory()
        if bound is None:
            raise LegroomError(say("how much memory there is cannot be told here"), why=where)
        if isolate is not None:
            return SubprocessTrialRunner(
                isolate, margin, "cpu", allowed=None, worst_case=worst_case, bound=bound
            )
        if not hasattr(os, "fork"):
            raise UsageError(
                say("a trial on the CPU needs a process of its own"),
                why=say("one that is too large ends in a kill, and this system cannot fork"),
                fix=(say("give isolate='module:factory', whose factory() returns the step"),),
            )
        assert step is not None
        return ForkTrialRunner(step, margin, bound, where, worst_case=worst_case)
    card = open_device(device, say("batches would be tried on it"))
    if isolate is not None:
        fraction = card.fraction()
        allowed = int(fraction * card.torch_size()) if fraction is not None and fraction < 1 else None
        return SubprocessTrialRunner(
            isolate, margin, card.name, allowed=allowed, worst_case=worst_case, bound=None
        )
    assert step is not None
    return GpuTrialRunner(card, step, margin, worst_case=worst_case, keep=keep)


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


MOST_TRIALS = 6
_FIRST = 2  # batch norm refuses a single sample
_EARLY = 0.4  # the second trial goes this far towards the cap by what the first one says alone
# Allocators cut memory into pieces: of three trainings on an H200 the fullest got 0.88, 0.93 and 0.94 of the cap out.
_SHARES = (0.92, 0.88, 0.85, 0.8)  # of the cap that the peak is aimed at: first, and after each failure there
_HOST_TOP = 0.985
_UP = 0.65  # of the way to the top, where the first of them fitted
_WORTH_A_TRIAL = 1.05  # times what fits already: less is not worth one of six
_ELASTIC = 1.2  # times the top: tried where a step that reached it had to make room and could
_FAR = 8  # a line is drawn from too little beyond this many times the largest batch measured:
_SHORT_OF_TOP = 0.9  # it is made better from here first,
_CAREFUL_FAR, _CAREFUL_SHORT = 1.4, 0.8  # the same where memory is only roughly a line
_BEYOND_FALL = 2  # times the largest batch: so far proportion is sure, where memory fell with it
_LINE_WAS_WRONG = 0.6  # and left, where it fails twice
_CLOSE = 0.02
_APART = 0.7  # points closer together than this do not make a line: noise would
_GROWTH = 256


def next_batch(
    trials: Sequence[Trial], cap: int, most: int | None = None, *, rough: bool = False
) -> int | None:
    """The batch to try next, None when there is nothing left to learn; ``cap`` is what the peak may reach.

    ``rough``: the host's malloc keeps or returns what was freed as it sees fit, so a line is no more than a hint.
    """
    if not trials:
        return _FIRST if most is None else min(_FIRST, most)
    low = largest_fitting(trials)
    high = min((trial.batch for trial in trials if not trial.fits), default=None)
    if low == 0:
        return None if high == 1 or len(trials) >= MOST_TRIALS else max(1, (high or 2) // 2)
    if len(trials) >= MOST_TRIALS or low == most:
        return None
    wanted = _upwards(trials, low, cap, rough) if high is None else _between(trials, low, high, cap)
    if wanted is None:
        return None
    wanted = max(low + 1, wanted)
    return wanted if most is None else min(wanted, most)


def largest_fitting(trials: Sequence[Trial]) -> int:
    """The largest batch that fitted; 0: none did."""
    return max((trial.batch for trial in trials if trial.fits), default=0)


def fit_line(trials: Sequence[Trial]) -> tuple[float, float] | None:
    """(fixed, per sample) of the line through the largest batch and the next that is well below it."""
    known = sorted({trial.batch: trial.peak for trial in trials if trial.peak is not None}.items())
    if len(known) < 2:
        return None
    top, peak = known[-1]
    lower = [point for point in known[:-1] if point[0] <= _APART * top] or known[:1]
    batch, at = lower[-1]
    slope = (peak - at) / (top - batch)
    return peak - slope * top, slope


def _top(trials: Sequence[Trial], cap: int, share: float = 1.0) -> float | None:
    """The batch at which the line meets that share of the cap; None: there is no line, or it does not rise."""
    found = fit_line(trials)
    if found is None or found[1] <= 0:
        return None
    fixed, slope = found
    return max(1.0, (share * cap - fixed) / slope)


def _is_line(trials: Sequence[Trial]) -> bool:
    """Whether the line's fixed part can be one: not below nothing, not above what the least of the trials took.

    glibc keeps what was freed of blocks up to 32 MB in its heap, with holes, and maps larger ones by themselves. Where
    the batch brings a model's blocks over that border a larger batch takes less: on a CPU 330 MB at 60 samples and 174
    at 66. A line through both sides says nothing.
    """
    fixed, _ = fit_line(trials) or (-1.0, 0.0)
    return 0 <= fixed <= min(trial.peak for trial in trials if trial.peak is not None)


def _in_proportion(trials: Sequence[Trial], low: int, cap: int) -> float:
    """The batch at which ``low``'s own bytes a sample meet the cap: sure wherever there is any fixed part."""
    return low * cap / max(1, next(trial.peak or 1 for trial in trials if trial.batch == low))


def _fell(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest batch took less than a smaller one: its blocks are beyond the border, as larger ones are."""
    peaks = {trial.batch: trial.peak or 0 for trial in trials if trial.fits}
    return peaks[low] < max(peaks.values())


def _upwards(trials: Sequence[Trial], low: int, cap: int, rough: bool) -> int | None:
    """Nothing has failed yet."""
    top = _top(trials, cap)
    if rough and len(trials) > 1 and not _is_line(trials):
        top = _in_proportion(trials, low, cap)
    if top is None:
        if len(trials) > 1:  # more samples, no more memory
            return low * _FAR
        only = next(trial for trial in trials if trial.fits)
        steady, peak = only.steady or 0, only.peak or 0
        each = max(1.0, (peak - steady) / low)  # work space that does not grow is laid on the samples too
        return int(min(max(low * 2, _EARLY * (cap - steady) / each), low * _GROWTH))
    if top - low <= max(1.0, _CLOSE * top):
        if _made_room(trials, low):
            return int(top * _ELASTIC)
        # One sample more may still fit: a few samples are a large share of a small batch.
        return low + 1 if top >= low + 1 and low < 1 / _CLOSE else None
    far, short = (_CAREFUL_FAR, _CAREFUL_SHORT) if rough else (_FAR, _SHORT_OF_TOP)
    if top > far * low and not (rough and _fell(trials, low) and top <= _BEYOND_FALL * low):
        return int(top * short)
    if (
        rough
    ):  # there a trial that fails is a process that dies: one step, and only as far as the line is sure
        return int(top * _HOST_TOP)
    near = int(_top(trials, cap, _SHARES[0]) or top)
    return near if near > _WORTH_A_TRIAL * low else int(low + _UP * (top - low))


def _made_room(trials: Sequence[Trial], low: int) -> bool:
    """Whether the largest step fitted by flushing the allocator's cache, at the top of the line or beyond.

    cuDNN takes the fastest way for which there is work space. Convolutions without TF32 on an H200 took 22 MB a sample
    up to 300 samples, which is where the line ends, and 16 MB at 375, which fitted too: the line is one of comfort.
    """
    return any(trial.fits and trial.retries and trial.batch == low for trial in trials)


def _between(trials: Sequence[Trial], low: int, high: int, cap: int) -> int | None:
    """Something failed at ``high`` and ``low`` fits."""
    if high - low <= max(1.0, _CLOSE * high):
        return None
    if low >= 0.85 * high:
        return (low + high) // 2
    top = _top(trials, cap)
    if top is None:  # a single point: halfway, in ratios
        return min(high - 1, int((low * high) ** 0.5))
    failures = sum(1 for trial in trials if not trial.fits)
    if failures > 1 and high > _FAR * low:
        return int(high * _LINE_WAS_WRONG)
    aimed = int(_top(trials, cap, _SHARES[min(failures, len(_SHARES) - 1)]) or top)
    if (
        aimed <= low
    ):  # more has fitted than was aimed at: the line itself is trusted, where it ends short of the failure
        aimed = int(top * _HOST_TOP)
        aimed = aimed if low < aimed < high * _HOST_TOP else (low + high) // 2
    return min(high - 1, aimed)


_AT_MOST = 2  # times the fewest steps, to divide the effective batch evenly


def split_effective_batch(largest: int, effective: int | None, ranks: int) -> tuple[int, int, str | None]:
    """(batch, accumulation, note): batch × accumulation × ranks is the effective batch, or the note says what it is."""
    if effective is None:
        return largest, 1, None
    if effective % ranks:
        raise UsageError(
            say("an effective batch of {effective} cannot be kept", effective=effective),
            why=say("{ranks} ranks do not divide it", ranks=ranks),
            fix=(say("ask for {near}", near=max(ranks, effective // ranks * ranks)),),
        )
    whole = effective // ranks
    fewest = -(-whole // largest)
    for steps in range(fewest, min(whole, _AT_MOST * fewest) + 1):
        if whole % steps == 0:
            return whole // steps, steps, None
    batch = -(-whole // fewest)
    note = say(
        "no batch up to {largest} divides {whole} samples a rank well: {steps} steps of {batch} make {made} instead of "
        "{effective}",
        largest=largest, whole=whole, steps=fewest, batch=batch, made=batch * fewest * ranks, effective=effective,
    )  # fmt: skip
    return batch, fewest, note


class SavedState:
    """``with Saved([model, optimizer]):`` leaves both as they were."""

    def __init__(self, keep: Sequence[Any]) -> None:
        self._keep = list(keep)
        self._states: list[Any] = []
        self._random: Any = None

    def __enter__(self) -> SavedState:
        if self._keep:
            import torch

            self._states = [_on_host(one.state_dict()) for one in self._keep]
            self._random = torch.get_rng_state()
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
        self._states.clear()


def _on_host(value: Any) -> Any:
    """A copy with every tensor in host memory, so that putting it aside takes nothing of the card."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    return copy.deepcopy(value)
