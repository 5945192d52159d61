"""tf32: one set of torch's flags is used, and the other stays readable."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

import legroom
from legroom.gpu.allow_tf32 import set_tf32

torch = pytest.importorskip("torch")


@pytest.fixture
def _restore_flags() -> Any:
    yield
    torch.set_float32_matmul_precision("highest")
    torch.backends.cudnn.allow_tf32 = True


@pytest.mark.usefixtures("_restore_flags")
def test_tf32_leaves_every_flag_readable() -> None:
    for on in (True, False, True):
        made = legroom.gpu.tf32(on)
        assert made.on is on and made.family == "allow_tf32"
        assert made.flags["cuda.matmul.allow_tf32"] is on and made.flags["cudnn.allow_tf32"] is on
        assert torch.get_float32_matmul_precision() == ("high" if on else "highest")


class TorchWithNewerFlags:
    """A torch with the newer flags set: reading the older ones raises."""

    def __init__(self, capability: tuple[int, int]) -> None:
        self.cuda = SimpleNamespace(is_available=lambda: True, get_device_capability=lambda _: capability)
        backend = SimpleNamespace
        self.backends = SimpleNamespace(
            cuda=SimpleNamespace(matmul=backend(fp32_precision="ieee")),
            cudnn=SimpleNamespace(conv=backend(fp32_precision="none"), rnn=backend(fp32_precision="none")),
        )
        self.touched = False

    def get_float32_matmul_precision(self) -> str:
        raise RuntimeError("PyTorch is checking the matmul precision without a specific backend name")

    def set_float32_matmul_precision(self, _: str) -> None:
        self.touched = True


def test_tf32_uses_newer_flags_if_already_set() -> None:
    fake = TorchWithNewerFlags((8, 0))
    made = set_tf32(fake, True)
    assert made.family == "fp32_precision" and set(made.flags.values()) == {"tf32"} and made.capable
    assert set(set_tf32(fake, False).flags.values()) == {"ieee"}
    assert not fake.touched


def test_note_on_gpu_without_tf32() -> None:
    made = set_tf32(TorchWithNewerFlags((7, 5)), True)
    assert made.capable is False and made.note is not None and "7.5" in made.note


@pytest.mark.usefixtures("_restore_flags")
def test_a_device_that_is_no_gpu_is_refused_before_a_flag_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", torch.cuda.get_device_properties)
    before = torch.get_float32_matmul_precision()
    with pytest.raises((ValueError, RuntimeError, AssertionError)):
        legroom.gpu.tf32(True, device="cpu")
    assert torch.get_float32_matmul_precision() == before
