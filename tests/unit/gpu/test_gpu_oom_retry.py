"""is_oom and on_oom: errors recognised by type, steps repeated in micro-batches with the same gradients."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest

from legroom.errors import DoesNotFit, UsageError
from legroom.gpu.model_call_loss_and_batch_split import count_samples, split_batch
from legroom.gpu.oom_retry import BatchNormWarning, is_oom, on_oom, release_frames

torch = pytest.importorskip("torch")


def net(*norm: Any) -> Any:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(6, 8), *norm, torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()


def batch_of(count: int) -> dict[str, Any]:
    torch.manual_seed(2)
    return {"x": torch.randn(count, 6).double(), "y": torch.randint(0, 3, (count,))}


def loss_on(model: Any, most: int, *, in_backward: bool = False) -> Any:
    """The loss; more than ``most`` samples at once run out of memory, before or during the backward pass."""

    def loss_of(batch: dict[str, Any]) -> Any:
        output = model(batch["x"])
        if len(batch["x"]) > most:
            if not in_backward:
                raise torch.OutOfMemoryError("CUDA out of memory.")
            # The last layer's gradients are there by then, the first layer's are not.
            output = _OomInBackward.apply(output, model)
        return torch.nn.functional.cross_entropy(output, batch["y"])

    return loss_of


def _whole(model: Any, batch: dict[str, Any]) -> list[Any]:
    model.zero_grad()
    torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).backward()
    return [one.grad.clone() for one in model.parameters()]


class _OomInBackward(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, value: Any, model: Any) -> Any:
        ctx.model = model
        return value.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        last = list(ctx.model.parameters())[-1]
        last.grad = torch.full_like(last, 7.0)  # a gradient of the failed backward pass
        raise torch.OutOfMemoryError("CUDA out of memory.")


@pytest.mark.parametrize("in_backward", [False, True])
@pytest.mark.parametrize(("count", "most"), [(16, 16), (16, 8), (16, 3), (13, 4), (7, 1)])
def test_gradients_equal_those_of_the_whole_batch(count: int, most: int, in_backward: bool) -> None:
    model, batch = net(), batch_of(count)
    wanted = _whole(model, batch)
    expected = torch.nn.functional.cross_entropy(model(batch["x"]), batch["y"]).detach()
    model.zero_grad()
    step = on_oom(model)(loss_on(model, most, in_backward=in_backward))
    loss = step(batch)
    assert torch.allclose(loss, expected, atol=1e-8)
    for one, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(one.grad, gradient, atol=1e-8)
    if most < count:
        assert step.micro_batch is not None and step.micro_batch <= most and step.halvings
    else:
        assert step.micro_batch is None
    tried = step.halvings
    step(batch)
    assert step.halvings == tried  # the micro-batch is kept


def test_existing_gradients_are_added_to() -> None:
    model, batch = net(), batch_of(12)
    wanted = [2 * one for one in _whole(model, batch)]
    step = on_oom(model)(loss_on(model, 5))
    step(batch)  # on top of those of _whole
    for one, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(one.grad, gradient, atol=1e-8)


def test_summed_loss_is_not_weighted() -> None:
    model, batch = net(), batch_of(9)

    def summed(part: dict[str, Any]) -> Any:
        if len(part["x"]) > 4:
            raise MemoryError
        return torch.nn.functional.cross_entropy(model(part["x"]), part["y"], reduction="sum")

    wanted = [9 * one for one in _whole(model, batch)]
    model.zero_grad()
    on_oom(model, reduction="sum")(summed)(batch)
    for one, gradient in zip(model.parameters(), wanted, strict=True):
        assert torch.allclose(one.grad, gradient, atol=1e-7)
    with pytest.raises(UsageError):
        on_oom(model, reduction="max")  # type: ignore[arg-type]


def test_batch_norm_warning_once() -> None:
    model = net(torch.nn.BatchNorm1d(8))
    step = on_oom(model)(loss_on(model, 4))
    with pytest.warns(BatchNormWarning, match="1 layer normalises over the batch") as caught:
        step(batch_of(16))
    assert len(caught) == 1


def test_other_errors_restore_gradients() -> None:
    model = net()
    before = _whole(model, batch_of(4))

    @on_oom(model)
    def loss_of(batch: Any) -> Any:
        """A loss."""
        model(batch["x"]).sum().backward()
        raise RuntimeError("out of memory, says the user")

    assert loss_of.__doc__ == "A loss."
    with pytest.raises(RuntimeError, match="says the user"):
        loss_of(batch_of(4))
    assert loss_of.halvings == 0
    for one, gradient in zip(model.parameters(), before, strict=True):
        assert torch.equal(one.grad, gradient)


def test_one_sample_does_not_fit() -> None:
    model = net()
    with pytest.raises(DoesNotFit, match="1 sample at a time"):
        on_oom(model)(loss_on(model, 0))(batch_of(8))


# Recognising out-of-memory errors.


def _raised(call: Any) -> BaseException:
    try:
        call()
    except BaseException as problem:
        return problem
    raise AssertionError


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (MemoryError(), "host"),
        (RuntimeError("CUDA error: out of memory\nCUDA kernel errors might…"), "gpu"),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), "gpu"),
        (RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"), "gpu"),
        (RuntimeError("we are out of memory"), None),
        (RuntimeError("queue: CUDA error: out of memory"), None),
        (type("Mine", (RuntimeError,), {})("CUDA error: out of memory"), None),
        (ValueError("CUDA out of memory."), None),
        (KeyboardInterrupt(), None),
    ],
)
def test_is_oom(problem: BaseException, kind: str | None) -> None:
    assert is_oom(problem) == kind


def test_is_oom_of_errors_that_torch_raises() -> None:
    assert is_oom(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")) == "gpu"
    assert is_oom(_raised(lambda: torch.empty(1 << 50))) == "host"
    accelerator = getattr(torch, "AcceleratorError", None)
    if accelerator is not None:
        assert is_oom(accelerator("CUDA error: device-side assert", 710)) is None


def test_release_frames_frees_tensors() -> None:
    import weakref

    seen = []

    def step() -> None:
        big = torch.empty(100)
        seen.append(weakref.ref(big))
        raise torch.OutOfMemoryError("x")

    problem = _raised(step)
    assert seen[0]() is not None
    release_frames(problem)
    assert seen[0]() is None


# Batches.

Pair = namedtuple("Pair", "x y")


def test_split_nested_batch() -> None:
    x = torch.arange(10).reshape(5, 2)
    batch = {"pair": Pair(x, [x[:, 0], {"z": x}]), "name": "faces", "scale": torch.tensor(2.0)}
    assert count_samples(batch) == 5
    first, second, last = split_batch(batch, 2)
    assert isinstance(first["pair"], Pair) and torch.equal(second["pair"].y[1]["z"], x[2:4])
    assert len(last["pair"].x) == 1 and last["name"] == "faces" and last["scale"] == 2
    assert first["pair"].x.data_ptr() == x.data_ptr()  # a view


def test_batch_that_cannot_be_counted() -> None:
    with pytest.raises(UsageError, match=r"\[2, 3\]"):
        count_samples([torch.zeros(2), torch.zeros(3)])
    with pytest.raises(UsageError, match="no tensor"):
        count_samples(object())
    assert count_samples(["a", "b"]) == 2


def test_two_ranks_halve_together_and_average_gradients(tmp_path: Path) -> None:
    """Two processes: one runs out of memory, both halve, and gradients equal those of DDP on whole batches."""
    script = Path(__file__).with_name("oom_rank.py")
    ranks = [
        subprocess.Popen(
            [sys.executable, "-W", "ignore", str(script), str(rank), str(tmp_path / "rendezvous")],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    reports = []
    try:
        for rank in ranks:
            out, errors = rank.communicate(timeout=240)
            assert rank.returncode == 0, errors[-2000:]
            reports.append(json.loads(out.splitlines()[-1]))
    finally:
        for rank in ranks:
            rank.kill()
    for one in reports:
        assert one["difference"] < 1e-9 and one["micro"] == 3
        assert one["disagreed"] and (one["batch"], one["steps"]) == (8, 4)


def test_models_that_communicate_in_every_layer_are_refused() -> None:
    class Sharded(torch.nn.Module):  # as FullyShardedDataParallel and DeepSpeedEngine look
        def __init__(self) -> None:
            super().__init__()
            self.module = net()

        def no_sync(self) -> None:
            pass

    with pytest.raises(UsageError, match="Sharded"):
        on_oom(Sharded())
    assert on_oom(net()) is not None
