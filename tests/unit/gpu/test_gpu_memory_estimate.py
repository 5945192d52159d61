"""Estimates, advice, accounts and TF32: figures that can be worked out by hand, and the model left alone."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from fake_cuda import GB, MB, FakeCuda, FakeDevice

import legroom
from legroom.errors import UsageError
from legroom.gpu.memory_account import account_device
from legroom.gpu.tf32_flags import set_tf32

torch = pytest.importorskip("torch")


def mlp(width: int = 256, layers: int = 4) -> Any:
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))


def test_the_parts_of_a_step() -> None:
    model, batch = mlp(), torch.randn(1000, 256)
    weight = 256 * 256 * 4
    layer = 1000 * 256 * 4
    found = legroom.gpu.estimate(model, batch, torch.optim.Adam(model.parameters()))
    assert found.how == "traced" and 0 < found.error < 0.2
    assert (found.weights, found.gradients, found.optimizer) == (4 * weight, 4 * weight, 8 * weight)
    # The input, four outputs, and the gradients of two of them on their way back.
    assert 5 * layer <= found.activations <= 8 * layer + 4 * weight
    assert found.peak == found.weights + found.gradients + found.optimizer + found.activations
    assert legroom.gpu.estimate(model, batch, torch.optim.SGD(model.parameters())).optimizer == 0
    assert found.as_dict()["peak"] == found.peak


def test_the_trace_is_what_really_happens() -> None:
    from legroom.gpu.memory_trace import run_small_steps, trace_step
    from legroom.gpu.training_step import default_loss

    model, batch = mlp(), torch.randn(64, 256)
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    fake = trace_step(model, batch, optimizer, default_loss)
    (real,) = run_small_steps(model, batch, optimizer, default_loss, [64])
    assert (fake.weights, fake.gradients, fake.optimizer) == (real.weights, real.gradients, real.optimizer)
    assert fake.peak == pytest.approx(real.peak, rel=0.02)


@pytest.mark.parametrize("ask", [legroom.gpu.estimate, legroom.gpu.advise])
def test_a_sample_the_model_does_not_take(
    ask: Any, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(UsageError, match="cannot take a step") as caught:
        ask(mlp(4, 1), torch.randn(8, 5))
    assert "RuntimeError" in caught.value.why and "5" in caught.value.why and "\n" not in caught.value.why
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert capfd.readouterr().err == "" and not caplog.records


@pytest.mark.parametrize("ask", [legroom.gpu.estimate, legroom.gpu.advise])
@pytest.mark.parametrize("optimizer", ["adam", 3, torch.optim.Adam])
def test_what_is_no_optimizer(ask: Any, optimizer: Any) -> None:
    with pytest.raises(UsageError, match="is no optimizer"):
        ask(mlp(4, 1), torch.randn(8, 4), optimizer)


@pytest.mark.parametrize("model", ["resnet18", None, torch.nn.Linear])
def test_what_is_no_model(model: Any) -> None:
    with pytest.raises(UsageError, match="is no model"):
        legroom.gpu.estimate(model, torch.randn(8, 4))


def test_nothing_is_changed() -> None:
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3), torch.nn.BatchNorm2d(4))
    before = {name: one.clone() for name, one in model.state_dict().items()}
    optimizer = torch.optim.AdamW(model.parameters())
    legroom.gpu.estimate(model, torch.randn(4, 3, 8, 8), optimizer)
    legroom.gpu.advise(model, torch.randn(4, 3, 8, 8), optimizer)
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())
    assert not optimizer.state and all(one.grad is None for one in model.parameters())


class Picks(torch.nn.Module):  # type: ignore[misc]
    """Its output's shape depends on its data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)

    def forward(self, x: Any) -> Any:
        y = self.layer(x)
        return y[y[:, 0] > -1000]


def test_shapes_that_depend_on_data_are_run_small() -> None:
    model = Picks()
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


def test_advice_says_what_it_cannot_tell() -> None:
    found = legroom.gpu.advise(mlp(), torch.randn(1, 256))
    assert set(found.left_out) == {"smaller-batch", "accumulation", "smaller-image"}
    fixed = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 8 * 8, 2))
    assert "smaller-image" in legroom.gpu.advise(fixed, torch.randn(4, 3, 8, 8)).left_out


def test_an_output_without_gradients() -> None:
    model = mlp().requires_grad_(False)
    with pytest.raises(UsageError, match="nothing to train on"):
        legroom.gpu.estimate(model, torch.randn(4, 256))


def test_named_arguments_and_a_loss() -> None:
    class Named(torch.nn.Module):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def forward(self, ids: Any, labels: Any = None) -> Any:
            return {"logits": self.layer(ids), "labels": labels}

    sample = {"ids": torch.randn(6, 4), "labels": torch.zeros(6)}
    assert legroom.gpu.estimate(Named(), sample).peak > 0
    assert legroom.gpu.estimate(Named(), sample, loss=lambda out: out["logits"].sum()).peak > 0


# TF32: one family of flags.


@pytest.fixture
def _flags() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("_flags")
def test_tf32_leaves_every_flag_readable() -> None:
    for on in (True, False, True):
        made = legroom.gpu.tf32(on)
        assert made.on is on and made.family == "allow_tf32"
        assert made.flags["cuda.matmul.allow_tf32"] is on and made.flags["cudnn.allow_tf32"] is on
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")


class Mixed:
    """A torch in which somebody has set the newer flags: the older ones raise when read."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda _: capability)
        place = SimpleNamespace
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=place(fp32_precision="ieee")),
            cudnn=SimpleNamespace(conv=place(fp32_precision="none"), rnn=place(fp32_precision="none")),
        )
        self.touched = False

    def get_float32_matmul_precision(self) -> str:
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    def set_float32_matmul_precision(self, _: str) -> None:
        self.touched = True


def test_tf32_by_the_newer_flags_alone_where_they_are_in_use() -> None:
    fake = Mixed((8, 0))
    made = set_tf32(fake, True)
    assert made.family == "fp32_precision" and set(made.flags.values()) == {"tf32"} and made.capable
    assert set(set_tf32(fake, False).flags.values()) == {"ieee"}
    assert not fake.touched


def test_a_card_without_tf32_is_named() -> None:
    made = set_tf32(Mixed((7, 5)), True)
    assert made.capable is False and made.note is not None and "7.5" in made.note


# The account.


class Tensor:
    """A tensor on the card, as far as an account looks at it."""

    layout = "strided"
    grad = None

    def __init__(self, size: int, place: int, grad: Tensor | None = None, device: str = "cuda") -> None:
        self.device = SimpleNamespace(type=device, index=0 if device == "cuda" else None)
        self._storage = SimpleNamespace(nbytes=lambda: size, data_ptr=lambda: place)
        self.grad = grad

    def untyped_storage(self) -> Any:
        return self._storage


def test_the_account_adds_up() -> None:
    cuda = FakeCuda(others=5 * GB)
    card = FakeDevice(cuda)
    card.warm_up()
    card.torch.is_tensor = lambda one: isinstance(one, Tensor)
    weight = Tensor(GB, 1, Tensor(GB, 2))
    tied = Tensor(GB, 1)
    model = SimpleNamespace(
        parameters=lambda recurse: [weight, tied], buffers=lambda recurse: [Tensor(7, 8, device="cpu")]
    )
    optimizer = SimpleNamespace(
        param_groups=[{"params": [weight]}],
        state={weight: {"m": Tensor(GB, 3), "v": Tensor(GB, 4), "step": 3}},
    )
    cuda.take(9 * GB)
    cuda.give(3 * GB)
    found = account_device(card, model, optimizer)
    assert (found.weights, found.gradients, found.optimizer) == (GB, GB, 2 * GB)
    assert (found.activations, found.cached) == (2 * GB, 3 * GB)
    assert found.overhead.bytes == cuda.context and found.others == 5 * GB
    assert found.unknown == 0
    assert found.used == 9 * GB + cuda.context + 5 * GB
    assert found.fragmentation == pytest.approx(3 * MB / (9 * GB))
    assert found.largest_free == 2 * MB and found.pinned == 64 * MB
    assert found.spilled is None and "Windows" in found.reasons["spilled"]


def test_an_account_without_nvml_says_what_it_cannot_tell() -> None:
    cuda = FakeCuda(others=30 * GB)
    card = FakeDevice(cuda, pid=None)
    card.warm_up()
    nothing = SimpleNamespace(parameters=lambda recurse: [], buffers=lambda recurse: [])
    found = account_device(card, nothing, SimpleNamespace(param_groups=[], state={}))
    assert found.overhead.bytes is None and found.others is None
    assert found.unknown == 30 * GB + cuda.context
    assert "overhead" in found.reasons and "others" in found.reasons


def test_names_come_without_torch() -> None:
    import subprocess
    import sys

    code = "import sys, legroom\nlegroom.gpu.limit, legroom.gpu.find_batch_size, legroom.gpu.on_oom, legroom.gpu.account\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert set(legroom.gpu.__all__) == set(legroom.gpu._HOMES) and set(legroom.gpu.__all__) <= set(
        dir(legroom.gpu)
    )
    with pytest.raises(AttributeError):
        _ = legroom.gpu.nonsense
