"""legroom.gpu.advise: what each way to less memory frees, for this model.

Covers: a smaller batch, mixed precision, a smaller image, accumulation; each with a number.
Does not cover: doing any of it, or what it does to accuracy.

The step is traced with fake tensors once for every variant: that takes no memory and changes nothing, and the error is
that of legroom.gpu.estimate.
"""

from __future__ import annotations

from typing import Any

from legroom.errors import UsageError
from legroom.gpu.card import import_torch
from legroom.gpu.pieces import pieces, samples
from legroom.gpu.step import Loss, mean_of
from legroom.gpu.taking import check_step, step_taken
from legroom.model.gpu import Advice, Saving
from legroom.words import say

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
    from legroom.gpu.tracing import Unknowable, trace

    check_step(model, optimizer)
    reduce = loss or mean_of
    count = samples(sample)
    left_out: dict[str, str] = {}
    savings: list[Saving] = []
    try:
        with step_taken(Unknowable):
            now = trace(model, sample, optimizer, reduce).peak
    except Unknowable as problem:
        raise UsageError(
            say("this model cannot be traced"),
            why=say("its shapes depend on its data ({problem})", problem=problem),
            fix=(say("legroom.gpu.find_batch_size measures real steps"),),
        ) from problem

    def add(name: str, what: str, changed: Any, autocast: Any = None) -> None:
        try:
            peak = trace(model, changed, optimizer, reduce, autocast).peak
        except Exception as problem:  # a model that takes one size only, a layer without that precision
            left_out[name] = say(
                "{kind}: {problem}", kind=type(problem).__name__, problem=str(problem).partition("\n")[0]
            )
            return
        savings.append(Saving(name, peak, now - peak, "traced", what))

    if count > 1:
        half = pieces(sample, -(-count // 2))[0]
        words = say("a batch of {half} instead of {count}", half=samples(half), count=count)
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
