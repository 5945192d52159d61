"""A training step followed tensor by tensor: with fake tensors, or with real ones.

Covers: the trace, and its four parts. Does not cover: what is said about it (estimating.py, advising.py).

The fake step uses fake parameters of its own through torch.func.functional_call: the model is not touched. The
optimizer is made anew on them with the caller's options, so that its state has the size it will have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)
from torch.utils._pytree import tree_leaves, tree_map

from legroom.gpu.pieces import pieces
from legroom.gpu.step import Loss, arguments
from legroom.gpu.taking import quiet_fakes
from legroom.gpu.tracking import Tracker, rounded
from legroom.model.gpu import Estimate

_CANNOT = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip


class Unknowable(Exception):
    """A step whose shapes depend on the values in it: fake tensors have none."""


@dataclass(frozen=True, slots=True)
class Run:
    """The parts of one step that was followed."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


def traced(model: Any, sample: Any, optimizer: Any, loss: Loss, error: float) -> Estimate:
    """The step with fake tensors; Unknowable where they cannot tell."""
    run = trace(model, sample, optimizer, loss)
    kept = run.weights + run.gradients + run.optimizer
    return Estimate(
        run.weights, run.gradients, run.optimizer, max(0, run.peak - kept), run.peak, error, "traced"
    )


def trace(model: Any, sample: Any, optimizer: Any, loss: Loss, autocast: torch.dtype | None = None) -> Run:
    """The same, as plain figures; with autocast if a type is named."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # a model may hold constants that are no buffers
    state: dict[str, torch.Tensor] = {
        name: fake.from_tensor(one) for name, one in (*model.named_parameters(), *model.named_buffers())
    }
    trained = [state[name] for name, one in model.named_parameters() if one.requires_grad]
    with quiet_fakes(), fake:
        batch = tree_map(
            lambda one: fake.from_tensor(one) if isinstance(one, torch.Tensor) else one, _plain(sample)
        )

        def forward() -> Any:
            positional, named = arguments(batch)
            return torch.func.functional_call(model, state, positional, named)

        stepper = _like(optimizer, model, state)
        try:
            return _follow(forward, loss, list(state.values()), trained, batch, stepper, autocast)
        except _CANNOT as problem:
            raise Unknowable(type(problem).__name__) from problem
        except RuntimeError as problem:
            if isinstance(problem.__cause__ or problem.__context__, _CANNOT):
                raise Unknowable(str(problem).partition("\n")[0]) from problem
            raise


def small_runs(model: Any, sample: Any, optimizer: Any, loss: Loss, sizes: Sequence[int]) -> list[Run]:
    """Real steps of the first few samples, followed; ``model`` is a copy that may be trained."""
    state = dict((*model.named_parameters(), *model.named_buffers()))
    trained = [one for one in model.parameters() if one.requires_grad]
    runs = []
    for size in sizes:
        part = pieces(sample, size)[0]
        model.zero_grad(set_to_none=True)
        positional, named = arguments(part)
        runs.append(
            _follow(
                lambda positional=positional, named=named: model(*positional, **named),
                loss, list(state.values()), trained, part, _like(optimizer, model, state), None,
            )
        )  # fmt: skip
    return runs


def _follow(
    forward: Any,
    loss: Loss,
    held: list[Any],
    trained: list[Any],
    batch: Any,
    stepper: Any,
    autocast: torch.dtype | None,
) -> Run:
    """Two steps: in the second the optimizer's state is there while activations are."""
    tracker = Tracker()
    weights = tracker.add(held)
    tracker.add(tree_leaves(batch))
    device = trained[0].device.type if trained else "cpu"
    with tracker:
        for _ in range(2):
            for one in trained:
                one.grad = None
            with torch.autocast(device, dtype=autocast or torch.bfloat16, enabled=autocast is not None):
                found = loss(forward())
            found.backward()
            del found
            if stepper is not None:
                stepper.step()
    gradients = sum(rounded(one.grad.untyped_storage().nbytes()) for one in trained if one.grad is not None)
    return Run(weights, gradients, _state_bytes(stepper, trained), tracker.peak)


def _state_bytes(stepper: Any, trained: list[Any]) -> int:
    if stepper is None:
        return 0
    device = trained[0].device if trained else None
    leaves = (leaf for one in stepper.state.values() for leaf in one.values())
    # Step counters are single numbers, and stay on the host beside a card.
    return sum(
        rounded(leaf.untyped_storage().nbytes())
        for leaf in leaves
        if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.device == device
    )


def _like(optimizer: Any, model: Any, state: dict[str, Any]) -> Any:
    """An optimizer as the given one, on these tensors; groups and their options kept."""
    if optimizer is None:
        return None
    names = {id(one): name for name, one in model.named_parameters()}
    if not any(id(one) in names for group in optimizer.param_groups for one in group["params"]):
        parameters = [state[name] for name, one in model.named_parameters() if one.requires_grad]
        return type(optimizer)([{**_options(optimizer.param_groups[0]), "params": parameters}])
    groups = [
        {**_options(group), "params": [state[names[id(one)]] for one in group["params"] if id(one) in names]}
        for group in optimizer.param_groups
    ]
    return type(optimizer)([group for group in groups if group["params"]])


def _options(group: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name not in ("params", "initial_lr")}


def _plain(sample: Any) -> Any:
    """A mapping of any class as a dict, which pytrees know."""
    return dict(sample) if hasattr(sample, "keys") else sample
