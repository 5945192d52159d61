"""legroom.gpu.estimate: what one training step will take, without running it.

Covers: tracing forward, backward and the optimizer's step with fake tensors, which have shapes and no memory; where a
model's shapes depend on its data, two small real runs and the line through them.
Does not cover: the context, other libraries' memory, fragmentation (legroom.gpu.find_batch_size measures those).
"""

from __future__ import annotations

import copy
from typing import Any

from legroom.errors import UsageError
from legroom.gpu.card import import_torch
from legroom.gpu.pieces import samples
from legroom.gpu.step import Loss, mean_of
from legroom.gpu.taking import check_step, step_taken
from legroom.model.gpu import Estimate
from legroom.words import say

# What the trace does not see: work space inside operations. Checked on a card by tests/gpu/test_gpu_memory.py.
_ERROR_TRACED = 0.10
_ERROR_EXTRAPOLATED = 0.15
_FEW = (2, 4)


def estimate(model: Any, sample: Any, optimizer: Any = None, *, loss: Loss | None = None) -> Estimate:
    """Weights, gradients, optimizer state, activations and peak of one step of ``model`` on ``sample``.

    Nothing is changed: neither model nor optimizer is stepped.

    Args:
        model: Anywhere, on the CPU too: the step is traced with tensors that have shapes and no memory.
        sample: A whole batch: a tensor, a tuple of arguments or a mapping of named ones.
        optimizer: Its state is part of the peak; None: no state.
        loss: ``loss(output)`` gives the loss; None takes ``output.loss``, or the mean of the outputs.
    """
    import_torch()
    from legroom.gpu.tracing import Unknowable, small_runs, traced

    check_step(model, optimizer)
    try:
        with step_taken(Unknowable):
            return traced(model, sample, optimizer, loss or mean_of, _ERROR_TRACED)
    except Unknowable as problem:
        count = samples(sample)
        if count <= _FEW[-1]:
            raise UsageError(
                say("the step cannot be traced, and the sample is too small to extrapolate to"),
                why=str(problem),
                fix=(say("give a batch of more than {few} samples", few=_FEW[-1]),),
            ) from problem
        with step_taken():
            few = small_runs(copy.deepcopy(model), sample, optimizer, loss or mean_of, _FEW)
        slope = (few[1].peak - few[0].peak) / (_FEW[1] - _FEW[0])
        peak = round(few[1].peak + slope * (count - _FEW[1]))
        kept = few[1].weights + few[1].gradients + few[1].optimizer
        note = say(
            "shapes depend on the data ({problem}): {low} and {high} samples were run on {device} and extrapolated",
            problem=problem, low=_FEW[0], high=_FEW[1], device=next(iter(model.parameters())).device,
        )  # fmt: skip
        return Estimate(
            few[1].weights, few[1].gradients, few[1].optimizer, max(0, peak - kept), peak, _ERROR_EXTRAPOLATED,
            "extrapolated", (note,),
        )  # fmt: skip
