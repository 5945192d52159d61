"""legroom.gpu.estimate and advise: predict the memory of a training step, and what each way to save would free.

The step is traced with fake tensors, which have shapes and no memory (fake_tensor_trace.py). Where a model's shapes
depend on its data, two small real steps are extrapolated. The CUDA context, other libraries' memory and fragmentation
are not included: legroom.gpu.find_batch_size measures those.
"""

from __future__ import annotations

import copy
from typing import Any

from legroom.errors import UsageError
from legroom.gpu.model_call_loss_and_batch_split import (
    Loss,
    check_model,
    count_samples,
    default_loss,
    split_batch,
    step_errors,
)
from legroom.gpu.torch_cuda_device import import_torch
from legroom.messages import say
from legroom.records.gpu_results import Advice, Estimate, Saving
from legroom.system.argument_checks import check_arguments
from legroom.system.lazy_and_optional_imports import import_lock

# The trace does not see workspace inside operations. Checked on a GPU by tests/gpu/test_gpu_memory.py.
_ERROR_TRACED = 0.10
_ERROR_EXTRAPOLATED = 0.15
_SMALL_BATCHES = (2, 4)
_SMALLER_SIDE = 0.75  # of an image: 224 → 168
_IMAGE_DIMENSIONS = 4  # samples, channels, height, width


def estimate(model: Any, sample: Any, optimizer: Any = None, *, loss: Loss | None = None) -> Estimate:
    """Weights, gradients, optimizer state, activations and peak of one step of ``model`` on ``sample``.

    Changes nothing: neither model nor optimizer takes a step.

    Args:
        model: On any device, the CPU too: the step is traced with tensors that have shapes and no memory.
        sample: A whole batch: a tensor, a tuple of arguments or a mapping of named ones.
        optimizer: Its state is part of the peak; None: no state.
        loss: ``loss(output)`` returns the loss; None takes ``output.loss``, or the mean of the outputs.
    """
    check_arguments(estimate, locals())
    import_torch()
    with import_lock:
        from legroom.gpu.fake_tensor_trace import NotTraceable, run_small_steps, trace_step

    check_model(model, optimizer)
    loss = loss or default_loss
    try:
        with step_errors(NotTraceable):
            traced = trace_step(model, sample, optimizer, loss)
    except NotTraceable as problem:
        count = count_samples(sample)
        if count <= _SMALL_BATCHES[-1]:
            raise UsageError(
                say("the step cannot be traced, and the sample is too small to extrapolate to"),
                why=str(problem),
                fix=(say("pass a batch of more than {few} samples", few=_SMALL_BATCHES[-1]),),
            ) from problem
        with step_errors():
            few, more = run_small_steps(copy.deepcopy(model), sample, optimizer, loss, _SMALL_BATCHES)
        slope = (more.peak - few.peak) / (_SMALL_BATCHES[1] - _SMALL_BATCHES[0])
        peak = round(more.peak + slope * (count - _SMALL_BATCHES[1]))
        note = say(
            "shapes depend on the data ({problem}): extrapolated from steps with {low} and {high} samples on {device}",
            problem=problem, low=_SMALL_BATCHES[0], high=_SMALL_BATCHES[1], device=_device(model),
        )  # fmt: skip
        return Estimate(
            more.weights, more.gradients, more.optimizer, max(0, peak - more.kept), peak, _ERROR_EXTRAPOLATED,
            "extrapolated", (note,),
        )  # fmt: skip
    return Estimate(
        traced.weights, traced.gradients, traced.optimizer, max(0, traced.peak - traced.kept), traced.peak,
        _ERROR_TRACED, "traced",
    )  # fmt: skip


def advise(model: Any, sample: Any, optimizer: Any = None, *, loss: Loss | None = None) -> Advice:
    """What a smaller batch, mixed precision, a smaller image and gradient accumulation would each free in this step.

    Changes nothing: neither model nor optimizer takes a step. Effects on accuracy are not considered.

    Args:
        model: On any device, the CPU too: steps are traced with tensors that have shapes and no memory.
        sample: A whole batch: a tensor, a tuple of arguments or a mapping of named ones.
        optimizer: Its state is part of the peak; None: no state.
        loss: ``loss(output)`` returns the loss; None takes ``output.loss``, or the mean of the outputs.
    """
    check_arguments(advise, locals())
    torch = import_torch()
    with import_lock:
        from legroom.gpu.fake_tensor_trace import NotTraceable, trace_step

    check_model(model, optimizer)
    loss_of = loss or default_loss
    count = count_samples(sample)
    left_out: dict[str, str] = {}
    savings: list[Saving] = []
    try:
        with step_errors(NotTraceable):
            now = trace_step(model, sample, optimizer, loss_of).peak
    except NotTraceable as problem:
        raise UsageError(
            say("this model cannot be traced"),
            why=say("its shapes depend on its data ({problem})", problem=problem),
            fix=(say("use legroom.gpu.find_batch_size, which measures real steps"),),
        ) from problem

    def add(name: str, what: str, changed: Any, autocast: Any = None) -> None:
        try:
            peak = trace_step(model, changed, optimizer, loss_of, autocast).peak
        except Exception as problem:  # a model with one input size only, a layer without that precision
            left_out[name] = say(
                "{kind}: {problem}", kind=type(problem).__name__, problem=str(problem).partition("\n")[0]
            )
            return
        savings.append(Saving(name, peak, now - peak, "traced", what))

    if count > 1:
        half = split_batch(sample, -(-count // 2))[0]
        add("smaller-batch", say("a batch of {half} instead of {count}", half=count_samples(half), count=count), half)
        _add_accumulation(savings, left_out, count)
    else:
        left_out["smaller-batch"] = left_out["accumulation"] = say("the batch has only one sample")
    add("mixed-precision", say("bfloat16 autocast around forward and loss"), sample, torch.bfloat16)
    image = _with_smaller_images(torch, sample)
    if image is None:
        left_out["smaller-image"] = say("no tensor in the sample is a batch of images")
    else:
        add("smaller-image", say("image sides reduced to {share:.0%}", share=_SMALLER_SIDE), image)
    return Advice(_device(model), count, now, "traced", tuple(savings), left_out)


def _device(model: Any) -> str:
    return str(next(iter(model.parameters())).device)


def _add_accumulation(savings: list[Saving], left_out: dict[str, str], count: int) -> None:
    """Two micro-batches per step: the memory of half the batch, the gradients of the whole."""
    half = next((saving for saving in savings if saving.name == "smaller-batch"), None)
    if half is None:
        left_out["accumulation"] = left_out["smaller-batch"]
        return
    what = say(
        "two micro-batches of {half} per step keep the effective batch of {count}", half=-(-count // 2), count=count
    )
    savings.append(Saving("accumulation", half.peak, half.frees, half.how, what))


def _with_smaller_images(torch: Any, sample: Any) -> Any:
    """The sample with smaller images; None if it has no images."""
    from torch.utils._pytree import tree_leaves, tree_map

    def smaller(one: Any) -> Any:
        if not isinstance(one, torch.Tensor) or one.ndim != _IMAGE_DIMENSIONS or not one.is_floating_point():
            return one
        sides = [max(1, int(side * _SMALLER_SIDE)) for side in one.shape[2:]]
        return one.new_empty((*one.shape[:2], *sides))

    plain = dict(sample) if hasattr(sample, "keys") else sample
    changed = tree_map(smaller, plain)
    pairs = zip(tree_leaves(plain), tree_leaves(changed), strict=True)
    return changed if any(old is not new for old, new in pairs) else None
