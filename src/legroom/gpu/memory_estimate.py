"""legroom.gpu.estimate: what one training step will take, without running it.

Covers: tracing forward, backward and the optimizer's step with fake tensors, which have shapes and no memory; where a
model's shapes depend on its data, two small real runs and the line through them.
Does not cover: the context, other libraries' memory, fragmentation (legroom.gpu.find_batch_size measures those).
"""

from __future__ import annotations

import copy
from typing import Any

from legroom.errors import UsageError
from legroom.gpu.cuda_device import import_torch
from legroom.gpu.training_step import Loss, check_model, count_samples, default_loss, split_batch, step_errors
from legroom.model.gpu import Advice, Estimate, Saving
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
    from legroom.gpu.memory_trace import NotTraceable, run_small_steps, trace_estimate

    check_model(model, optimizer)
    try:
        with step_errors(NotTraceable):
            return trace_estimate(model, sample, optimizer, loss or default_loss, _ERROR_TRACED)
    except NotTraceable as problem:
        count = count_samples(sample)
        if count <= _FEW[-1]:
            raise UsageError(
                say("the step cannot be traced, and the sample is too small to extrapolate to"),
                why=str(problem),
                fix=(say("give a batch of more than {few} samples", few=_FEW[-1]),),
            ) from problem
        with step_errors():
            few = run_small_steps(copy.deepcopy(model), sample, optimizer, loss or default_loss, _FEW)
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


_SMALLER = 0.75  # of an image's sides: 224 → 168
_IMAGE = 4  # samples, channels, height, width


def advise(model: Any, sample: Any, optimizer: Any = None, *, loss: Loss | None = None) -> Advice:
    """What a smaller batch, mixed precision, a smaller image and accumulation would each free of this step.

    Nothing is changed: neither model nor optimizer is stepped.

    Args:
        model: Anywhere, on the CPU too: steps are traced with tensors that have shapes and no memory.
        sample: A whole batch: a tensor, a tuple of arguments or a mapping of named ones.
        optimizer: Its state is part of the peak; None: no state.
        loss: ``loss(output)`` gives the loss; None takes ``output.loss``, or the mean of the outputs.
    """
    torch = import_torch()
    from legroom.gpu.memory_trace import NotTraceable, trace_step

    check_model(model, optimizer)
    reduce = loss or default_loss
    count = count_samples(sample)
    left_out: dict[str, str] = {}
    savings: list[Saving] = []
    try:
        with step_errors(NotTraceable):
            now = trace_step(model, sample, optimizer, reduce).peak
    except NotTraceable as problem:
        raise UsageError(
            say("this model cannot be traced"),
            why=say("its shapes depend on its data ({problem})", problem=problem),
            fix=(say("legroom.gpu.find_batch_size measures real steps"),),
        ) from problem

    def add(name: str, what: str, changed: Any, autocast: Any = None) -> None:
        try:
            peak = trace_step(model, changed, optimizer, reduce, autocast).peak
        except Exception as problem:  # a model that takes one size only, a layer without that precision
            left_out[name] = say(
                "{kind}: {problem}", kind=type(problem).__name__, problem=str(problem).partition("\n")[0]
            )
            return
        savings.append(Saving(name, peak, now - peak, "traced", what))

    if count > 1:
        half = split_batch(sample, -(-count // 2))[0]
        words = say("a batch of {half} instead of {count}", half=count_samples(half), count=count)
        add("smaller-batch", words, half)
        _accumulation(savings, left_out, count)
    else:
        left_out["smaller-batch"] = left_out["accumulation"] = say("the batch is one sample")
    add("mixed-precision", say("bfloat16 autocast around forward and loss"), sample, torch.bfloat16)
    image = _smaller(torch, sample)
    if image is None:
        left_out["smaller-image"] = say("no tensor of the sample is a batch of images")
    else:
        side = say("sides of {share:.0%}", share=_SMALLER)
        add("smaller-image", side, image)
    device = str(next(iter(model.parameters())).device)
    return Advice(device, count, now, "traced", tuple(savings), left_out)


def _accumulation(savings: list[Saving], left_out: dict[str, str], count: int) -> None:
    """Two micro-batches a step: the memory of the smaller batch, the gradients of the whole."""
    half = next((saving for saving in savings if saving.name == "smaller-batch"), None)
    if half is None:
        left_out["accumulation"] = left_out["smaller-batch"]
        return
    words = say(
        "two micro-batches of {half} a step keep the effective batch of {count}",
        half=-(-count // 2),
        count=count,
    )
    savings.append(Saving("accumulation", half.peak, half.frees, half.how, words))


def _smaller(torch: Any, sample: Any) -> Any:
    """The sample with its images shrunk; None: there are none."""
    from torch.utils._pytree import tree_leaves, tree_map

    def shrunk(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or one.ndim != _IMAGE or not one.is_floating_point():
            return one
        sides = [max(1, int(side * _SMALLER)) for side in one.shape[2:]]
        return one.new_empty((*one.shape[:2], *sides))

    plain = dict(sample) if hasattr(sample, "keys") else sample
    changed = tree_map(shrunk, plain)
    pairs = zip(tree_leaves(plain), tree_leaves(changed), strict=True)
    return changed if any(old is not new for old, new in pairs) else None
