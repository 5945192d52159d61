"""Parts of a training step: check model and optimizer, call arguments, default loss, count and split a batch.

Errors that model, loss or optimizer raise become a UsageError with the cause.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from legroom.errors import LegroomError, UsageError
from legroom.messages import say

Loss = Callable[[Any], Any]


def check_model(model: Any, optimizer: Any) -> None:
    """Raise UsageError if ``model`` is not a model, or ``optimizer`` neither an optimizer nor None."""
    if not callable(getattr(model, "named_parameters", None)) or isinstance(model, type):
        raise UsageError(
            say("{given!r} is not a model", given=model),
            why=say("model must be a torch.nn.Module (got {kind})", kind=_kind(model)),
            fix=(say("pass the model object that you train"),),
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(
            say("{given!r} is not an optimizer", given=optimizer),
            why=say("optimizer must be a torch.optim.Optimizer on the model's parameters (got {kind})",
                    kind=_kind(optimizer)),
            fix=(say("pass optimizer=torch.optim.AdamW(model.parameters()), or None for no optimizer state"),),
        )  # fmt: skip


def _kind(value: Any) -> str:
    return say("a class") if isinstance(value, type) else type(value).__name__


@contextmanager
def step_errors(*passed_on: type[BaseException]) -> Iterator[None]:
    """Turn errors of model, loss or optimizer into a UsageError; out-of-memory and ``passed_on`` are raised as is."""
    import torch

    unchanged: tuple[type[BaseException], ...] = (LegroomError, torch.OutOfMemoryError, *passed_on)
    try:
        yield
    except unchanged:
        raise
    except Exception as problem:
        text = str(problem).strip().partition("\n")[0]
        raise UsageError(
            say("the training step fails on this sample"),
            why=say("{kind}: {problem}", kind=type(problem).__name__, problem=text),
            fix=(say("pass a batch that model(sample) accepts, and loss= if the model's output is not a loss"),),
        ) from problem  # fmt: skip


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """(positional, named) arguments for the model: of a tensor, a tuple or list of arguments, or a mapping."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def default_loss(output: Any) -> Any:
    """``output.loss`` if the model returns one, else the mean of all outputs that require gradients."""
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = dict(output) if isinstance(output, Mapping) else output
    means = [one.float().mean() for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.requires_grad]
    if not means:
        raise UsageError(
            say("the model's output cannot be trained on"),
            why=say("no tensor in it requires gradients"),
            fix=(say("pass loss=, a function of the output, and parameters that require gradients"),),
        )
    return sum(means[1:], means[0])


# Batches: nested dicts, lists, tuples and named tuples whose tensors have the samples in the first dimension.


def count_samples(batch: Any) -> int:
    """The length of the first dimension of the batch's tensors; without tensors, the length of the batch."""
    lengths = sorted({len(one) for one in _tensors(batch) if one.ndim})
    if len(lengths) == 1:
        return lengths[0]
    if not lengths and hasattr(batch, "__len__"):
        return len(batch)
    raise UsageError(
        say("the samples of the batch cannot be counted"),
        why=say("the first dimensions of its tensors differ: {lengths}", lengths=lengths)
        if lengths
        else say("a {kind} contains no tensor and has no length", kind=type(batch).__name__),
        fix=(
            say("put samples in the first dimension of every tensor; or pass cut= and a batch with a len()"),
        ),
    )  # fmt: skip


def split_batch(batch: Any, size: int) -> list[Any]:
    """The batch in parts of ``size`` samples, the last one smaller; views, not copies."""
    return [_slice(batch, start, start + size) for start in range(0, count_samples(batch), size)]


def _tensors(value: Any) -> list[Any]:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return [value]
    members = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [one for member in members for one in _tensors(member)]


def _slice(value: Any, start: int, stop: int) -> Any:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return value[start:stop] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _slice(one, start, stop) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_slice(one, start, stop) for one in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value
