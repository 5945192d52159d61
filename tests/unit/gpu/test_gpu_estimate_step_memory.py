"""estimate and advise: figures that can be worked out by hand; model and optimizer unchanged."""

from __future__ import annotations

from typing import Any

import pytest

import legroom
from legroom.errors import UsageError

torch = pytest.importorskip("torch")


def mlp(width: int = 256, layers: int = 4) -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def test_estimate_by_category() -> None:
    model, batch = mlp(), torch.randn(1000, 256)
    weight = 256 * 256 * 4
    layer = 1000 * 256 * 4
    found = legroom.gpu.estimate(model, batch, torch.optim.Adam(model.parameters()))
    assert found.how == "traced" and 0 < found.error < 0.2
    assert (found.weights, found.gradients, found.optimizer) == (4 * weight, 4 * weight, 8 * weight)
    # The input, four outputs, and the gradients of two of them in the backward pass.
    assert 5 * layer <= found.activations <= 8 * layer + 4 * weight
    assert found.peak == found.weights + found.gradients + found.optimizer + found.activations
    assert legroom.gpu.estimate(model, batch, torch.optim.SGD(model.parameters())).optimizer == 0
    assert found.as_dict()["peak"] == found.peak


def test_fake_and_real_trace_agree() -> None:
    from legroom.gpu.fake_tensor_trace import run_small_steps, trace_step
    from legroom.gpu.model_call_loss_and_batch_split import default_loss

    model, batch = mlp(), torch.randn(64, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fake = trace_step(model, batch, optimizer, default_loss)
    (real,) = run_small_steps(model, batch, optimizer, default_loss, [64])
    assert (fake.weights, fake.gradients, fake.optimizer) == (real.weights, real.gradients, real.optimizer)
    assert fake.peak == pytest.approx(real.peak, rel=0.02)


@pytest.mark.parametrize("function", [legroom.gpu.estimate, legroom.gpu.advise])
def test_sample_that_the_model_rejects(
    function: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="the training step fails") as caught:
        function(mlp(4, 1), torch.randn(8, 5))
    assert "RuntimeError" in caught.value.why and "5" in caught.value.why and "\n" not in caught.value.why
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.mark.parametrize("function", [legroom.gpu.estimate, legroom.gpu.advise])
@pytest.mark.parametrize("optimizer", ["adam", 3, torch.optim.Adam])
def test_not_an_optimizer(function: Any, optimizer: Any) -> None:
    with pytest.raises(UsageError, match="is not an optimizer"):
        function(mlp(4, 1), torch.randn(8, 4), optimizer)


@pytest.mark.parametrize("model", ["resnet18", None, torch.nn.Linear])
def test_not_a_model(model: Any) -> None:
    with pytest.raises(UsageError, match="is not a model"):
        legroom.gpu.estimate(model, torch.randn(8, 4))


def test_model_and_optimizer_are_unchanged() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    legroom.gpu.estimate(model, torch.randn(4, 3, 8, 8), optimizer)
    legroom.gpu.advise(model, torch.randn(4, 3, 8, 8), optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not optimizer.state and all(one.grad is None for one in model.parameters())


class DataDependentShape(torch.nn.Module):  # type: ignore[misc]
    """Its output's shape depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y[y[:, 0] > -1000]


def test_data_dependent_shapes_are_extrapolated() -> None:
    model = DataDependentShape()
    found = legroom.gpu.estimate(model, torch.randn(512, 8), torch.optim.SGD(model.parameters()))
    assert found.how == "extrapolated" and "depend on the data" in found.notes[0]
    assert 512 * 8 * 4 <= found.activations <= 20 * 512 * 8 * 4
    assert model.layer.weight.grad is None
    with pytest.raises(UsageError, match="too small"):
        legroom.gpu.estimate(model, torch.randn(3, 8))
    with pytest.raises(UsageError, match="cannot be traced"):
        legroom.gpu.advise(model, torch.randn(64, 8))


def test_advice_has_numbers() -> None:
    model = torch.nn.Sequential(
        torch.nn.Conv2d(3, 16, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(16, 16, 3, padding=1),
        torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(16, 2),
    )  # fmt: skip
    found = legroom.gpu.advise(model, torch.randn(16, 3, 64, 64))
    savings = {saving.name: saving for saving in found.savings}
    assert set(savings) == {"smaller-batch", "accumulation", "mixed-precision", "smaller-image"}
    assert savings["smaller-batch"].frees == pytest.approx(found.peak / 2, rel=0.1)
    assert savings["smaller-image"].frees == pytest.approx(found.peak * (1 - 0.75**2), rel=0.15)
    assert savings["mixed-precision"].frees > 0.2 * found.peak
    assert savings["accumulation"].frees == savings["smaller-batch"].frees
    assert found.get("smaller-batch") is savings["smaller-batch"] and found.get("nonsense") is None


def test_advice_reports_what_it_leaves_out() -> None:
    found = legroom.gpu.advise(mlp(), torch.randn(1, 256))
    assert set(found.left_out) == {"smaller-batch", "accumulation", "smaller-image"}
    fixed = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
    assert "smaller-image" in legroom.gpu.advise(fixed, torch.randn(4, 3, 8, 8)).left_out


def test_output_without_gradients() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(UsageError, match="cannot be trained on"):
        legroom.gpu.estimate(model, torch.randn(4, 256))


def test_named_arguments_and_custom_loss() -> None:
    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, ids: Any, labels: Any = None) -> Any:
            return {"logits": self.layer(ids), "labels": labels}

    sample = {"ids": torch.randn(6, 4), "labels": torch.zeros(6)}
    assert legroom.gpu.estimate(Named(), sample).peak > 0
    assert legroom.gpu.estimate(Named(), sample, loss=lambda out: out["logits"].sum()).peak > 0
