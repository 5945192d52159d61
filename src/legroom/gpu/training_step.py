"""One training step of a model on a sample, as estimates and advice need it.

Covers: calling a model on any kind of sample, a loss where none is given, slicing a sample. Does not cover: measuring.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from legroom.errors import LegroomError, UsageError
from legroom.words import say

Loss = Callable[[Any], Any]


def call_arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a sample: a tensor, a tuple or list of arguments, or a mapping of named ones."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def default_loss(output: Any) -> Any:
    """A loss where none is given: ``output.loss`` if the model has one, else the mean of every real output."""
    import torch
    from torch.utils._pytree import tree_leaves

    loss = getattr(output, "loss", None)
    if loss is not None:
        return loss
    values = dict(output) if isinstance(output, Mapping) else output
    means = [
        one.float().mean()
        for one in tree_leaves(values)
        if isinstance(one, torch.Tensor) and one.requires_grad
    ]
    if not means:
        raise UsageError(
            say("the model's output has nothing to train on"),
            why=say("no tensor of it needs a gradient"),
            fix=(say("give loss=, a function of the output; and parameters that require gradients"),),
        )
    return sum(means[1:], means[0])


_FAKE = "torch._subclasses.fake_tensor"  # writes a page about every operation that refuses its arguments


def check_model(model: Any, optimizer: Any) -> None:
    """UsageError for what cannot be a model or an optimizer."""
    if not callable(getattr(model, "named_parameters", None)) or isinstance(model, type):
        raise UsageError(
            say("{given!r} is no model", given=model),
            why=say("a torch.nn.Module is needed, not {kind}", kind=_kind(model)),
            fix=(say("give the model itself, as it is trained"),),
        )
    if optimizer is not None and not isinstance(getattr(optimizer, "param_groups", None), list):
        raise UsageError(
            say("{given!r} is no optimizer", given=optimizer),
            why=say("a torch.optim.Optimizer on the model's parameters is needed, not {kind}",
                    kind=_kind(optimizer)),
            fix=(say("optimizer=torch.optim.AdamW(model.parameters()); None where there is no state"),),
        )  # fmt: skip


@contextmanager
def step_errors(*passed_on: type[BaseException]) -> Iterator[None]:
    """UsageError with the cause where model, loss or optimizer refuse what they are given."""
    import torch

    others: tuple[type[BaseException], ...] = (LegroomError, torch.OutOfMemoryError, *passed_on)
    try:
        yield
    except others:
        raise
    except Exception as problem:
        words = str(problem).strip().partition("\n")[0]
        raise UsageError(
            say("the model cannot take a step on this sample"),
            why=say("{kind}: {problem}", kind=type(problem).__name__, problem=words),
            fix=(say("give a batch that model(sample) takes, and loss= where its output is no loss"),),
        ) from problem


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """No log of operations that refuse fake tensors: the exception says it."""
    log, silent = logging.getLogger(_FAKE), _Silent()
    log.addFilter(silent)
    try:
        yield
    finally:
        log.removeFilter(silent)


class _Silent(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return False


def _kind(value: Any) -> str:
    return say("class") if isinstance(value, type) else type(value).__name__


def count_samples(batch: Any) -> int:
    """How many samples a batch holds: the length of its tensors' first dimension; without tensors, its own."""
    lengths = sorted({len(one) for one in _tensors(batch) if one.ndim})
    if len(lengths) == 1:
        return lengths[0]
    if not lengths and hasattr(batch, "__len__"):
        return len(batch)
    raise UsageError(
        say("the samples of the batch cannot be counted"),
        why=say("its tensors' first dimensions are {lengths}", lengths=lengths)
        if lengths
        else say("there is no tensor in a {kind}, and it has no length", kind=type(batch).__name__),
        fix=(
            say("put samples in front in every tensor; or give cut=, and a batch whose len() counts samples"),
        ),
    )


def split_batch(batch: Any, size: int) -> list[Any]:
    """The batch in pieces of ``size`` samples, the last one smaller; views, not copies."""
    return [_part(batch, start, start + size) for start in range(0, count_samples(batch), size)]


def _tensors(value: Any) -> list[Any]:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return [value]
    members = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return [one for member in members for one in _tensors(member)]


def _part(value: Any, start: int, stop: int) -> Any:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return value[start:stop] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _part(one, start, stop) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_part(one, start, stop) for one in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value
