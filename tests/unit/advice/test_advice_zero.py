"""What the stages of ZeRO take, by arithmetic and against DeepSpeed's own estimators."""

from __future__ import annotations

import pytest

from legroom.advice.zero_and_deepspeed import Shape, zero_rows
from legroom.errors import UsageError

B = 10**9


def row(shape: Shape, stage: int, offload: str) -> tuple[int, int]:
    (found,) = (one for one in zero_rows(shape) if (one.stage, one.offload) == (stage, offload))
    return found.gpu, found.host


def test_stage_2_is_2p_and_18p_over_n() -> None:
    assert row(Shape(B, ranks=1), 2, "none")[0] == 20 * B
    assert row(Shape(B, ranks=3), 2, "none") == (2 * B + 6 * B, int(4 * 3 * B * 1.5))
    assert row(Shape(B, ranks=3), 2, "optimizer") == (2 * B, 24 * B)
    assert row(Shape(B, ranks=8), 2, "optimizer") == (2 * B, 48 * B)


def test_stage_3_divides_everything_and_gathers_a_layer() -> None:
    shape = Shape(B, ranks=4, nodes=2, largest_layer=B // 10)
    layer = 4 * B // 10
    assert row(shape, 3, "none") == (layer + 18 * B // 4, int(4 * 2 * B / 10 * 1.5))
    assert row(shape, 3, "optimizer") == (layer + 2 * B // 4, int(16 * B / 2 * 1.5))
    assert row(shape, 3, "all") == (layer, int(18 * B / 2 * 1.5))


def test_an_unknown_layer_makes_stage_3_a_lower_bound() -> None:
    rows = zero_rows(Shape(B, ranks=4))
    assert {one.stage for one in rows if one.at_least} == {3}
    assert not any(one.at_least for one in zero_rows(Shape(B, ranks=4, largest_layer=B // 10)))


def test_savings_are_against_plain_torch_and_may_be_none() -> None:
    alone, eight = zero_rows(Shape(B, ranks=1)), zero_rows(Shape(B, ranks=8))
    assert alone[0].stage == 0 and alone[0].gpu == 16 * B and alone[0].saves == 0
    assert next(one for one in alone if (one.stage, one.offload) == (2, "none")).saves == -4 * B  # more, on one GPU
    assert all(one.saves == 16 * B - one.gpu for one in eight)


@pytest.mark.parametrize(
    "asked",
    [{"params": 0}, {"params": B, "ranks": 0}, {"params": B, "ranks": 3, "nodes": 2}, {"params": B, "largest_layer": B + 1},
     {"params": B, "largest_layer": 0}],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(asked: dict[str, int]) -> None:
    with pytest.raises(UsageError):
        Shape(**asked)


@pytest.mark.parametrize("params", [60_506_624, 2_851_598_336])
@pytest.mark.parametrize(("ranks", "nodes"), [(1, 1), (3, 1), (8, 1), (16, 2)])
def test_deepspeeds_own_estimators_agree(params: int, ranks: int, nodes: int) -> None:
    two = pytest.importorskip("deepspeed.runtime.zero.stage_1_and_2")
    three = pytest.importorskip("deepspeed.runtime.zero.stage3")
    layer = params // 20
    shape = Shape(params, ranks, nodes, layer)
    each = ranks // nodes
    for offload, name in ((False, "none"), (True, "optimizer")):
        host, gpu = two.estimate_zero2_model_states_mem_needs(params, each, nodes, offload)
        assert row(shape, 2, name) == (gpu, host)
    for optimizer, weights, name in ((False, False, "none"), (True, False, "optimizer"), (True, True, "all")):
        host, gpu, _ = three.estimate_zero3_model_states_mem_needs(params, layer, each, nodes, optimizer, weights, True)
        assert row(shape, 3, name) == (gpu, host)
