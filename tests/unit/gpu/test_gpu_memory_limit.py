"""Limits: a share becomes torch's cap with the context taken off, is read back, and says what it leaves out."""

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
from legroom.gpu import memory_account, memory_limit
from legroom.gpu.cuda_device import open_device
from legroom.gpu.memory_limit import VARIABLE, apply_from_environment, chosen_index, limit_bytes, with_limit

LATER = memory_limit._LATER


def test_the_whole_process_stays_within_the_share() -> None:
    cuda = FakeCuda()
    made = memory_limit.limit_device(FakeDevice(cuda), 0.2)
    assert made.asked == int(0.2 * cuda.size)
    assert made.overhead.bytes == cuda.context and made.overhead.how == "measured"
    assert made.allowed + cuda.context + LATER == made.asked
    assert made.read_back == pytest.approx(made.allowed / cuda.size)
    assert made.held and not made.notes
    assert any("NCCL" in words for words in made.not_bounded)
    with pytest.raises(RuntimeError):
        cuda.take(made.allowed + MB)
    cuda.take(made.allowed - MB)
    assert cuda.context + cuda.held <= made.asked


@given(st.floats(0.05, 1), st.integers(100, 2000), st.integers(8, 144))
def test_context_and_torch_together_never_exceed_the_share(share: float, context: int, size: int) -> None:
    cuda = FakeCuda(size * GB, context * MB)
    try:
        made = memory_limit.limit_device(FakeDevice(cuda), share)
    except BadLimit:
        assert share * size * GB <= context * MB + LATER
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


@pytest.mark.parametrize(
    "amount", [0, 0.0, 1.5, -1, -0.1, 81 * GB, "81GB", "nonsense", "0", "3/0", True, float("nan")]
)
def test_limits_that_cannot_be(amount: Any) -> None:
    with pytest.raises(BadLimit) as caught:
        limit_bytes(amount, None, 80 * GB)
    assert caught.value.why and caught.value.fix


@pytest.mark.parametrize("share", [0, 1.5, "a"])
def test_shares_that_cannot_be(share: Any) -> None:
    with pytest.raises(BadLimit):
        limit_bytes(None, share, 80 * GB)


def test_nothing_or_both_asked_for() -> None:
    for arguments in ((None, None), (0.5, 0.5)):
        with pytest.raises(BadLimit):
            limit_bytes(*arguments, 80 * GB)


def test_a_share_smaller_than_the_context_is_refused_with_the_figures() -> None:
    with pytest.raises(BadLimit, match="500 MB"):
        memory_limit.limit_device(FakeDevice(FakeCuda()), 300 * MB)


def test_a_bad_limit_makes_no_context() -> None:
    cuda = FakeCuda()
    with pytest.raises(BadLimit):
        memory_limit.limit_device(FakeDevice(cuda), 1.5)
    assert not cuda.started


def test_others_in_the_way_are_reported() -> None:
    made = memory_limit.limit_device(FakeDevice(FakeCuda(others=70 * GB)), 0.5)
    assert made.others == 70 * GB
    assert any("10 GB of the 40 GB are there" in note for note in made.notes)


def test_cached_memory_goes_and_live_memory_is_named() -> None:
    cuda = FakeCuda()
    cuda.take(30 * GB)
    cuda.give(28 * GB)
    assert memory_limit.limit_device(FakeDevice(cuda), "10GB").reserved == 2 * GB
    cuda.take(7 * GB)
    made = memory_limit.limit_device(FakeDevice(cuda), "5GB")
    assert not made.held
    assert any("9 GB already" in note for note in made.notes)


def test_recheck_tightens_and_never_loosens() -> None:
    cuda = FakeCuda()
    made = memory_limit.limit_device(FakeDevice(cuda), 0.2)
    assert made.recheck().allowed == made.allowed
    cuda.context += LATER  # kernels that were loaded since
    tighter = made.recheck()
    assert tighter.allowed < made.allowed
    assert tighter.allowed + cuda.context <= made.asked
    cuda.context -= LATER
    assert tighter.recheck().allowed == tighter.allowed


def test_the_async_allocator_is_told_apart() -> None:
    cuda = FakeCuda()
    cuda.allocator = "cudaMallocAsync"
    assert "cudaMallocAsync" in memory_limit.limit_device(FakeDevice(cuda), 0.5).bounded[0]


# The context, by every way of telling it.


def test_context_by_the_entry_that_grows() -> None:
    """NVML's pids are the host's: ours is the one that grows when we do."""
    cuda = FakeCuda(others=3 * GB)
    found = memory_account.measure_overhead(
        FakeDevice(cuda, pid=4242) if cuda.started else _started(cuda, 4242)
    )
    assert (found.bytes, found.how) == (cuda.context, "measured")
    assert "host's" in found.source
    assert cuda.live == 0


def test_context_by_the_cards_change() -> None:
    cuda = FakeCuda(others=30 * GB)
    card = FakeDevice(cuda, pid=None)
    before = memory_account.used_before_context(card)
    assert before is not None
    card.warm_up()
    found = memory_account.measure_overhead(card, before)
    assert (found.bytes, found.how) == (cuda.context, "bounded")
    assert memory_account.used_before_context(card) is None


def test_context_by_a_bound_or_an_assumption_that_is_named() -> None:
    alone = memory_account.measure_overhead(_started(FakeCuda(), None))
    assert (alone.bytes, alone.how) == (500 * MB, "bounded")
    crowded = memory_account.measure_overhead(_started(FakeCuda(others=30 * GB), None))
    assert crowded.how == "assumed" and "1 GB" in crowded.source


def test_a_change_that_others_made_is_not_taken_for_the_context() -> None:
    cuda = FakeCuda(others=30 * GB)
    card = FakeDevice(cuda, pid=None)
    before = memory_account.used_before_context(card)
    card.warm_up()
    cuda.others -= 10 * GB
    assert memory_account.measure_overhead(card, before).how == "assumed"


def test_two_that_grew_alike_are_not_told_apart() -> None:
    assert (
        memory_account.grown_by({1: 10 * GB, 2: 5 * GB}, {1: 10 * GB, 2: 5 * GB + 46 * MB}, 46 * MB) == 5 * GB
    )
    assert memory_account.grown_by({1: 0, 2: 0}, {1: 46 * MB, 2: 46 * MB}, 46 * MB) is None


def _started(cuda: FakeCuda, pid: int | None) -> FakeDevice:
    card = FakeDevice(cuda, pid)
    card.warm_up()
    return card


# Without a card, and by the environment.


def test_without_cuda_it_says_so() -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a card")
    for ask in (lambda: legroom.gpu.limit(0.5), legroom.gpu.account):
        with pytest.raises(NoCuda) as caught:
            ask()
        assert "would be" in str(caught.value) and caught.value.why and caught.value.fix


@pytest.mark.parametrize(
    ("asked", "named"),
    [((0.8, None), "80 %"), (("20GB", None), "20 GB"), ((8 * GB, None), "8 GB"), ((None, 1 / 6), "16.7 %")],
)
def test_without_cuda_it_says_what_it_would_have_set(
    asked: tuple[Any, Any], named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("legroom.gpu.cuda_device.why_no_cuda", lambda _: "none today")
    with pytest.raises(NoCuda, match=f"limited to {named} of its memory"):
        legroom.gpu.limit(asked[0], share=asked[1])


@pytest.mark.parametrize(
    "asked", [(0, None), (1.5, None), ("lots", None), (None, None), (0.5, 0.5), ([1], None), (None, "a")]
)
def test_what_no_card_could_give_is_refused_without_one(asked: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("legroom.gpu.cuda_device.why_no_cuda", lambda _: "none today")
    with pytest.raises(BadLimit):
        legroom.gpu.limit(asked[0], share=asked[1])


def test_a_device_that_is_not_there() -> None:
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


def test_the_variable_is_checked_before_a_child_gets_it() -> None:
    assert with_limit({"A": "b"}, "0.8") == {"A": "b", VARIABLE: "0.8"}
    assert with_limit({}, "20GB")[VARIABLE] == "20GB"
    for wrong in ("0", "1.5", "much"):
        with pytest.raises(BadLimit):
            with_limit({}, wrong)


def test_the_environments_limit_waits_until_cuda_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    card = FakeDevice(FakeCuda())
    monkeypatch.setattr(memory_limit, "CudaDevice", lambda torch, index: card)
    assert apply_from_environment(card.torch, {}) is False
    assert apply_from_environment(card.torch, {VARIABLE: "0.25"}) is True
    assert card.cuda.fraction == 1.0 and not card.cuda.started
    card.cuda.queued[0]()
    assert 0.2 < card.cuda.fraction < 0.25
    assert "limited to 20 GB of 80 GB, context included" in capsys.readouterr().err
    apply_from_environment(card.torch, {VARIABLE: "1.5"})
    card.cuda.queued[1]()
    assert "no limit on the card" in capsys.readouterr().err


def test_which_device_is_ours() -> None:
    assert chosen_index({"LOCAL_RANK": "2"}, 4, 0) == 2
    assert chosen_index({"LOCAL_RANK": "9"}, 4, 1) == 1
    assert chosen_index({"LOCAL_RANK": "x"}, 4, 0) == chosen_index({}, 4, 0) == 0
    assert os.environ.get(VARIABLE) is None
