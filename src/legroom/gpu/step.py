"""One training step of a model on a sample, as estimates and advice need it.

Covers: calling a model on any kind of sample, a loss where none is given, slicing a sample. Does not cover: measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.words import say

Loss = Callable[[Any], Any]


def arguments(sample: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """How a model is called with a sample: a tensor, a tuple or list of arguments, or a mapping of named ones."""
    if isinstance(sample, Mapping):
        return (), dict(sample)
    if isinstance(sample, (tuple, list)):
        return tuple(sample), {}
    return (sample,), {}


def mean_of(output: Any) -> Any:
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
