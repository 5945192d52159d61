"""limit: the context is subtracted, torch's allocator gets the rest, and the environment variable waits for CUDA."""

from __future__ import annotations

import os
from fractions import Fraction
from typing import Any

import pytest
from fake_cuda import GB, MB, FakeCuda, FakeDevice
from hypothesis import given
from hypothesis import strategies as st

import legroom
from legroom.errors import BadLimit, NoCuda, UsageError
from legroom.gpu import set_memory_limit
from legroom.gpu.set_memory_limit import VARIABLE, apply_from_environment, limit_bytes, local_device, with_limit
from legroom.gpu.torch_cuda_device import open_device

LATER_KERNELS = set_memory_limit._LATER_KERNELS


def test_whole_process_stays_within_the_limit() -> None:
    cuda = FakeCuda()
    made = set_memory_limit.limit_device(FakeDevice(cuda), 0.2)
    assert made.asked == int(0.2 * cuda.size)
    assert made.overhead.bytes == cuda.context and made.overhead.how == "measured"
    assert made.allowed + cuda.context + LATER_KERNELS == made.asked
    assert made.read_back == pytest.approx(made.allowed / cuda.size)
    assert made.held and not made.notes
    assert any("NCCL" in text for text in made.not_bounded)
    with pytest.raises(RuntimeError):
        cuda.take(made.allowed + MB)
    cuda.take(made.allowed - MB)
    assert cuda.context + cuda.held <= made.asked


@given(st.floats(0.05, 1), st.integers(100, 2000), st.integers(8, 144))
def test_context_plus_torch_never_exceed_the_limit(share: float, context: int, size: int) -> None:
    cuda = FakeCuda(size * GB, context * MB)
    try:
        made = set_memory_limit.limit_device(FakeDevice(cuda), share)
    except BadLimit:
        assert share * size * GB <= context * MB + LATER_KERNELS
        return
    assert made.fraction * cuda.size + cuda.context <= made.asked
    assert 0 < made.fraction <= 1


@pytest.mark.parametrize(
    ("amount", "expected"),
    [(0.5, 40 * GB), ("0.5", 40 * GB), ("50%", 40 * GB), ("1/4", 20 * GB), ("8GB", 8 * GB), (8 * GB, 8 * GB), (1, 80 * GB), ("1", 80 * GB), (str(8 * GB), 8 * GB)],
)  # fmt: skip
def test_amounts(amount: Any, expected: int) -> None:
    assert limit_bytes(amount, None, 80 * GB) == expected


def test_equal_shares() -> None:
    assert limit_bytes(None, 1 / 6, 60 * GB) == pytest.approx(10 * GB, abs=2)
    assert 6 * limit_bytes(None, Fraction(1, 6), 80 * GB) <= 80 * GB


@pytest.mark.parametrize("amount", [0, 0.0, 1.5, -1, -0.1, 81 * GB, "81GB", "nonsense", "0", "3/0", True, float("nan")])
def test_invalid_amounts(amount: Any) -> None:
    with pytest.raises(BadLimit) as caught:
        limit_bytes(amount, None, 80 * GB)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("share", [0, 1.5, "a"])
def test_invalid_shares(share: Any) -> None:
    with pytest.raises(BadLimit):
        limit_bytes(None, share, 80 * GB)


def test_neither_or_both_of_amount_and_share() -> None:
    for arguments in ((None, None), (0.5, 0.5)):
        with pytest.raises(BadLimit):
            limit_bytes(*arguments, 80 * GB)


def test_limit_below_context_is_refused_with_figures() -> None:
    with pytest.raises(BadLimit, match="500 MB"):
        set_memory_limit.limit_device(FakeDevice(FakeCuda()), 300 * MB)


def test_bad_limit_creates_no_context() -> None:
    cuda = FakeCuda()
    with pytest.raises(BadLimit):
        set_memory_limit.limit_device(FakeDevice(cuda), 1.5)
    assert not cuda.started


def test_note_on_memory_of_other_processes() -> None:
    made = set_memory_limit.limit_device(FakeDevice(FakeCuda(others=70 * GB)), 0.5)
    assert made.others == 70 * GB
    assert any("only 10 GB of the 40 GB limit is available" in note for note in made.notes)


def test_cache_is_emptied_and_live_memory_noted() -> None:
    cuda = FakeCuda()
    cuda.take(30 * GB)
    cuda.give(28 * GB)
    assert set_memory_limit.limit_device(FakeDevice(cuda), "10GB").reserved == 2 * GB
    cuda.take(7 * GB)
    made = set_memory_limit.limit_device(FakeDevice(cuda), "5GB")
    assert not made.held
    assert any("already reserved 9 GB" in note for note in made.notes)


def test_recheck_tightens_and_never_loosens() -> None:
    cuda = FakeCuda()
    made = set_memory_limit.limit_device(FakeDevice(cuda), 0.2)
    assert made.recheck().allowed == made.allowed
    cuda.context += LATER_KERNELS  # kernels that were loaded since
    tighter = made.recheck()
    assert tighter.allowed < made.allowed
    assert tighter.allowed + cuda.context <= made.asked
    cuda.context -= LATER_KERNELS
    assert tighter.recheck().allowed == tighter.allowed


def test_async_allocator_is_named() -> None:
    cuda = FakeCuda()
    cuda.allocator = "cudaMallocAsync"
    assert "cudaMallocAsync" in set_memory_limit.limit_device(FakeDevice(cuda), 0.5).bounded[0]


# Without CUDA, and by the environment variable.


def test_no_cuda_error() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("CUDA is available")
    for function in (lambda: legroom.gpu.limit(0.5), legroom.gpu.account):
        with pytest.raises(NoCuda) as caught:
            function()
        assert "cannot" in str(caught.value) and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("given", "named"),
    [((0.8, None), "80%"), (("20GB", None), "20 GB"), ((8 * GB, None), "8 GB"), ((None, 1 / 6), "16.7%")],
)
def test_no_cuda_error_names_the_amount(given: tuple[Any, Any], named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.gpu.torch_cuda_device.why_no_cuda", lambda _: "no driver")
    with pytest.raises(NoCuda, match=f"cannot limit this process to {named} of GPU memory"):
        legroom.gpu.limit(given[0], share=given[1])


@pytest.mark.parametrize(
    "given", [(0, None), (1.5, None), ("lots", None), (None, None), (0.5, 0.5), ([1], None), (None, "a")]
)
def test_invalid_amounts_are_refused_without_cuda(given: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.gpu.torch_cuda_device.why_no_cuda", lambda _: "no driver")
    with pytest.raises(BadLimit):
        legroom.gpu.limit(given[0], share=given[1])


def test_device_that_does_not_exist() -> None:
    fake = FakeDevice(FakeCuda()).torch
    fake.device = _device
    assert open_device(None, "x", fake).index == 0
    assert open_device("cuda:0", "x", fake).index == open_device(0, "x", fake).index == 0
    for device in ("cuda:1", 3, "cpu"):
        with pytest.raises(UsageError):
            open_device(device, "x", fake)


def _device(text: str) -> Any:
    import types

    kind, _, index = text.partition(":")
    return types.SimpleNamespace(type=kind, index=int(index) if index else None)


def test_variable_is_checked_before_a_child_starts() -> None:
    assert with_limit({"A": "b"}, "0.8") == {"A": "b", VARIABLE: "0.8"}
    assert with_limit({}, "20GB")[VARIABLE] == "20GB"
    for wrong in ("0", "1.5", "much"):
        with pytest.raises(BadLimit):
            with_limit({}, wrong)


def test_environment_limit_waits_for_cuda(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    device = FakeDevice(FakeCuda())
    monkeypatch.setattr(set_memory_limit, "CudaDevice", lambda torch, index: device)
    assert apply_from_environment(device.torch, {}) is False
    assert apply_from_environment(device.torch, {VARIABLE: "0.25"}) is True
    assert device.cuda.fraction == 1.0 and not device.cuda.started
    device.cuda.queued[0]()
    assert 0.2 < device.cuda.fraction < 0.25
    assert "limited to 20 GB of 80 GB, context included" in capsys.readouterr().err
    apply_from_environment(device.torch, {VARIABLE: "1.5"})
    device.cuda.queued[1]()
    assert "GPU limit not set" in capsys.readouterr().err


def test_local_device() -> None:
    assert local_device({"LOCAL_RANK": "2"}, 4, 0) == 2
    assert local_device({"LOCAL_RANK": "9"}, 4, 1) == 1
    assert local_device({"LOCAL_RANK": "x"}, 4, 0) == local_device({}, 4, 0) == 0
    assert os.environ.get(VARIABLE) is None


def test_a_share_is_one_of_what_shared_copies_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = FakeCuda(others=20 * GB)  # the copy
    device = FakeDevice(cuda)
    alone = set_memory_limit.limit_device(device, None, 1 / 4)
    assert alone.asked == 20 * GB and alone.shared == 0
    monkeypatch.setattr(device, "shared_maps", lambda: [(1 << 40, 20 * GB)])
    one_of_four = set_memory_limit.limit_device(device, None, 1 / 4)
    assert one_of_four.asked == 15 * GB and one_of_four.shared == 20 * GB and one_of_four.others == 0
    assert one_of_four.overhead.bytes == cuda.context and not one_of_four.notes
    assert alone.recheck().asked == 15 * GB and alone.recheck().allowed < alone.allowed
    assert set_memory_limit.limit_device(device, 15 * GB).allowed == one_of_four.allowed  # bytes stay bytes
