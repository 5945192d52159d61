"""Trace a training step's allocations, tensor by tensor, with fake tensors or with real ones. Imports torch.

The fake step runs on fake parameters through torch.func.functional_call, so the model is not touched. The optimizer is
created anew on them with the caller's options, so its state has the size it will have. Workspace that libraries
allocate inside one operation (cuDNN, cuBLAS) is in no tensor and is not counted.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
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

from legroom.gpu.model_call_loss_and_batch_split import Loss, call_arguments, split_batch
from legroom.gpu.torch_cuda_device import allocator_size

_NOT_TRACEABLE = (
    DataDependentOutputException, DynamicOutputShapeException, UnsupportedFakeTensorException,
    UnsupportedOperatorException,
)  # fmt: skip
_FAKE_TENSOR_LOG = "torch._subclasses.fake_tensor"  # logs a page for each operation that rejects its arguments


class NotTraceable(Exception):
    """The step's shapes depend on the values of its tensors, which fake tensors do not have."""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """Bytes of one traced step."""

    weights: int
    gradients: int
    optimizer: int
    peak: int

    @property
    def kept(self) -> int:
        """Bytes that stay between steps."""
        return self.weights + self.gradients + self.optimizer


def trace_step(model: Any, sample: Any, optimizer: Any, loss: Loss, autocast: torch.dtype | None = None) -> StepMemory:
    """The step with fake tensors, under autocast if a type is given; NotTraceable where they do not suffice."""
    fake = FakeTensorMode(allow_non_fake_inputs=True)  # a model may hold constants that are not buffers
    state: dict[str, torch.Tensor] = {
        name: fake.from_tensor(one) for name, one in (*model.named_parameters(), *model.named_buffers())
    }
    trained = [state[name] for name, one in model.named_parameters() if one.requires_grad]
    plain = dict(sample) if hasattr(sample, "keys") else sample  # pytrees know dicts, not every mapping
    with _quiet_fake_tensors(), fake:
        batch = tree_map(lambda one: fake.from_tensor(one) if isinstance(one, torch.Tensor) else one, plain)

        def forward() -> Any:
            positional, named = call_arguments(batch)
            return torch.func.functional_call(model, state, positional, named)

        like = _optimizer_like(optimizer, model, state)
        try:
            return _follow(forward, loss, list(state.values()), trained, batch, like, autocast)
        except _NOT_TRACEABLE as problem:
            raise NotTraceable(type(problem).__name__) from problem
        except RuntimeError as problem:
            if isinstance(problem.__cause__ or problem.__context__, _NOT_TRACEABLE):
                raise NotTraceable(str(problem).partition("\n")[0]) from problem
            raise


def run_small_steps(model: Any, sample: Any, optimizer: Any, loss: Loss, sizes: Sequence[int]) -> list[StepMemory]:
    """Real steps on the first few samples; ``model`` is a copy that may be trained."""
    state = dict((*model.named_parameters(), *model.named_buffers()))
    trained = [one for one in model.parameters() if one.requires_grad]
    steps = []
    for size in sizes:
        part = split_batch(sample, size)[0]
        model.zero_grad(set_to_none=True)
        positional, named = call_arguments(part)
        steps.append(
            _follow(
                lambda positional=positional, named=named: model(*positional, **named),
                loss, list(state.values()), trained, part, _optimizer_like(optimizer, model, state), None,
            )
        )  # fmt: skip
    return steps


def _follow(
    forward: Any,
    loss: Loss,
    held: list[Any],
    trained: list[Any],
    batch: Any,
    optimizer: Any,
    autocast: torch.dtype | None,
) -> StepMemory:
    """Follow two steps: in the second the optimizer's state exists together with the activations."""
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
            if optimizer is not None:
                optimizer.step()
    gradients = sum(_tensor_bytes(one.grad) for one in trained if one.grad is not None)
    return StepMemory(weights, gradients, _state_bytes(optimizer, trained), tracker.peak)


def _state_bytes(optimizer: Any, trained: list[Any]) -> int:
    if optimizer is None:
        return 0
    device = trained[0].device if trained else None
    leaves = (leaf for one in optimizer.state.values() for leaf in one.values())
    # Step counters are scalars, and stay on the host.
    return sum(
        _tensor_bytes(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.ndim and leaf.device == device
    )


def _tensor_bytes(tensor: torch.Tensor) -> int:
    return allocator_size(tensor.untyped_storage().nbytes())


def _optimizer_like(optimizer: Any, model: Any, state: dict[str, Any]) -> Any:
    """A new optimizer of the same class on these tensors, with the same groups and options."""
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


class AllocationTracker(TorchDispatchMode):
    """While active, counts the storage of every operation's results; ``add`` counts what existed before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()

    def add(self, tensors: Iterable[Any]) -> int:
        """Count those that are not counted yet; returns the bytes added."""
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
        weakref.finalize(storage, self._freed, key, size).atexit = False

    def _freed(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result


@contextmanager
def _quiet_fake_tensors() -> Iterator[None]:
    """Silence torch's log of operations that reject fake tensors: the exception has the same information."""
    log = logging.getLogger(_FAKE_TENSOR_LOG)

    def silence(record: logging.LogRecord) -> bool:
        return False

    log.addFilter(silence)
    try:
        yield
    finally:
        log.removeFilter(silence)
