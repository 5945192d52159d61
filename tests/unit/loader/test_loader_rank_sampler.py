"""The order of an epoch and the ranks' parts of it."""

from __future__ import annotations

import zlib
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from legroom.errors import UsageError
from legroom.loader.rank_sampler import RankSampler, SampledBatch, Uneven, permutation, process_group, rank_and_world

# What these seeds have always given. If a line here must change, every checkpoint in the world goes on elsewhere.
GOLDEN = {
    (0, 0): [0, 2, 9, 1, 8, 5, 4, 3, 6, 7],
    (0, 1): [5, 3, 7, 8, 2, 4, 1, 0, 6, 9],
    (42, 7): [6, 8, 7, 4, 5, 2, 9, 0, 1, 3],
    (2**64 - 1, 2**63): [9, 5, 8, 0, 3, 1, 2, 6, 7, 4],
}


@pytest.mark.parametrize(("seed", "epoch"), GOLDEN)
def test_the_order_never_changes(seed: int, epoch: int) -> None:
    assert permutation(10, seed, epoch).tolist() == GOLDEN[seed, epoch]
    assert zlib.crc32(permutation(100_000, 123, 456).astype("<i8").tobytes()) == 560113729


@given(st.integers(0, 5000), st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_every_row_once(rows: int, seed: int, epoch: int) -> None:
    order = permutation(rows, seed, epoch)
    assert order.dtype == np.int64
    assert np.array_equal(np.sort(order), np.arange(rows))


def test_seeds_and_epochs_differ_and_orders_are_even() -> None:
    orders = {tuple(permutation(50, seed, epoch).tolist()) for seed in range(20) for epoch in (0, 1, 2, 2**40)}
    assert len(orders) == 80
    firsts = np.bincount([permutation(4, 7, epoch)[0] for epoch in range(4000)], minlength=4)
    assert firsts.min() > 800  # 1000 each are expected, with a deviation of 27


@given(st.data())
def test_steps_divide_the_order(data: st.DataObject) -> None:
    rows, size, world = (data.draw(st.integers(low, high)) for low, high in ((0, 300), (1, 40), (1, 9)))
    uneven, drop_last = data.draw(st.sampled_from(get_args(Uneven))), data.draw(st.booleans())
    shares = [RankSampler(rows, size, drop_last, rank, world, uneven) for rank in range(world)]
    dealt = [_places(share) for share in shares]
    assert [len(share) for share in shares] == [len(batches) for batches in dealt]
    seen = [place % rows for batches in dealt for batch in batches for place in batch]
    sizes = {tuple(len(batch) for batch in batches) for batches in dealt}
    assert all(len(batch) == size for batches in dealt for batch in batches[:-1])
    if uneven != "all":
        assert len(sizes) == 1  # every rank has the same batches: nobody waits for ever
    if not drop_last:
        if uneven == "all":
            assert sorted(seen) == list(range(rows))
        elif uneven == "pad":
            assert set(seen) == set(range(rows)) and len(seen) == -(-rows // world) * world
        else:
            assert len(set(seen)) == len(seen) == rows - rows % world
    else:
        assert all(len(batch) == size for batches in dealt for batch in batches)


@given(st.data())
def test_every_row_once_over_any_stops_and_worlds(data: st.DataObject) -> None:
    rows = data.draw(st.integers(0, 400))
    position, seen = 0, []
    while True:
        world, size = data.draw(st.integers(1, 7)), data.draw(st.integers(1, 30))
        stop_after = data.draw(st.integers(1, 6) | st.none())
        shares = [RankSampler(rows, size, False, rank, world, "all") for rank in range(world)]
        after = position
        for share in shares:
            batches, reached = _dealt(share, position, stop_after)
            seen += [place for batch in batches for place in batch]
            after = reached if share.rank == 0 else after
        if stop_after is None or after == position:
            break
        position = after
    assert sorted(seen) == list(range(rows))


def _places(share: RankSampler) -> list[range]:
    return _dealt(share, 0, None)[0]


def _dealt(share: RankSampler, position: int, most: int | None) -> tuple[list[range], int]:
    found: list[range] = []
    while (most is None or len(found) < most) and (step := share.step(position)) is not None:
        found.append(range(step.first, step.last))
        position = step.after
    return found, position


def test_padding_begins_again_at_the_start() -> None:
    assert RankSampler(5, 4, rank=1, world_size=2).step(0) == SampledBatch(3, 6, 5)  # place 5 is place 0


LAUNCHED = [
    ({}, (0, 1)),
    ({"RANK": "3", "WORLD_SIZE": "8"}, (3, 8)),
    ({"RANK": "3"}, (0, 1)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"}, (1, 2)),
    ({"PMI_RANK": "1", "PMI_SIZE": "4"}, (1, 4)),
    ({"SLURM_PROCID": "5", "SLURM_NTASKS": "6", "SLURM_STEP_NUM_TASKS": "6"}, (5, 6)),
    ({"SLURM_PROCID": "0", "SLURM_NTASKS": "6"}, (0, 1)),  # a batch script, which is one process
    ({"SLURM_PROCID": "0", "SLURM_STEP_NUM_TASKS": "2", "RANK": "3", "WORLD_SIZE": "4"}, (3, 4)),
]


@pytest.mark.parametrize(("env", "found"), LAUNCHED)
def test_launchers(env: dict[str, str], found: tuple[int, int]) -> None:
    assert rank_and_world(None, None, env) == found
    assert rank_and_world(1, 3, env) == (1, 3)
    assert rank_and_world(None, None, env, (2, 5)) == (2, 5)


@pytest.mark.parametrize(
    ("rank", "world", "env", "words"),
    [
        (3, 3, {}, "rank=3, world_size=3"),
        (-1, 3, {}, "rank=-1, world_size=3"),
        (0, 0, {}, "rank=0, world_size=0"),
        (2**70, 2**71, {}, r"world_size must be less than 2\*\*31"),
        (0, None, {}, "both rank and world_size"),
        (None, 2, {}, "both rank and world_size"),
        (None, None, {"RANK": "two", "WORLD_SIZE": "3"}, "RANK must be an integer"),
        (None, None, {"RANK": "3", "WORLD_SIZE": "3"}, "RANK and WORLD_SIZE"),
    ],
)
def test_invalid_ranks_are_refused(rank: int | None, world: int | None, env: dict[str, str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        rank_and_world(rank, world, env)


def test_without_a_process_group_there_is_none() -> None:
    assert process_group() is None
