"""A training step followed tensor by tensor: with fake tensors, or with real ones.

Covers: the trace, and its four parts. Does not cover: what is said about it (estimating.py, advising.py).

The fake step uses fake parameters of its own through torch.func.functional_call: the model is not touched. The
optimizer is made anew on them with the caller's options, so that its state has the size it will have.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
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
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from legroom.gpu.training_step import Loss, call_arguments, quiet_fakes, split_batch
from legroom.model.gpu import Estimate

_CANNOT = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip


class NotTraceable(Exception):
    """A step whose shapes depend on the values in it: fake tensors have none."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The parts of one step that was followed."""

    weights: int
    gradients: int
    optimizer: int
    peak: int


def trace_estimate(model: Any, sample: Any, optimizer: Any, loss: Loss, error: float) -> Estimate:
    """The step with fake tensors; Unknowable where they cannot tell."""
    run = trace_step(model, sample, optimizer, loss)
    kept = run.weights + run.gradients + run.optimizer
    return Estimate(
        run.weights, run.gradients, run.optimizer, max(0, run.peak - kept), run.peak, error, "traced"
    )


def trace_step(
    model: Any, sample: Any, optimizer: Any, loss: Loss, autocast: torch.dtype | None = None
) -> StepMemory:
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
            positional, named = call_arguments(batch)
            return torch.func.functional_call(model, state, positional, named)

        stepper = _like(optimizer, model, state)
        try:
            return _follow(forward, loss, list(state.values()), trained, batch, stepper, autocast)
        except _CANNOT as problem:
            raise NotTraceable(type(problem).__name__) from problem
        except RuntimeError as problem:
            if isinstance(problem.__cause__ or problem.__context__, _CANNOT):
                raise NotTraceable(str(problem).partition("\n")[0]) from problem
            raise


def run_small_steps(
    model: Any, sample: Any, optimizer: Any, loss: Loss, sizes: Sequence[int]
) -> list[StepMemory]:
    """Real steps of the first few samples, followed; ``model`` is a copy that may be trained."""
    state = dict((*model.named_parameters(), *model.named_buffers()))
    trained = [one for one in model.parameters() if one.requires_grad]
    runs = []
    for size in sizes:
        part = split_batch(sample, size)[0]
        model.zero_grad(set_to_none=True)
        positional, named = call_arguments(part)
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
) -> StepMemory:
    """Two steps: in the second the optimizer's state is there while activations are."""
    tracker = AllocationTracker()
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
    gradients = sum(
        allocator_size(one.grad.untyped_storage().nbytes()) for one in trained if one.grad is not None
    )
    return StepMemory(weights, gradients, _state_bytes(stepper, trained), tracker.peak)


def _state_bytes(stepper: Any, trained: list[Any]) -> int:
    if stepper is None:
        return 0
    device = trained[0].device if trained else None
    leaves = (leaf for one in stepper.state.values() for leaf in one.values())
    # Step counters are single numbers, and stay on the host beside a card.
    return sum(
        allocator_size(leaf.untyped_storage().nbytes())
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


_BLOCK = 512  # torch's allocator gives out multiples of this


def allocator_size(size: int) -> int:
    """What the allocator sets aside for a request."""
    return -(-size // _BLOCK) * _BLOCK


class AllocationTracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, sees every operation's results; what was there before is told by ``add``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()
        self._serial = 0

    def add(self, tensors: Iterable[Any]) -> int:
        """Count these, if they are not counted yet; gives the bytes that came in."""
        before = self.now
        for one in tensors:
            if isinstance(one, torch.Tensor) and one.layout == torch.strided:
                self._count(one.untyped_storage())
        self.peak = max(self.peak, self.now)
        return self.now - before

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        size = allocator_size(storage.nbytes())
        if key in self._seen or not size:
            return
        self._seen.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result
