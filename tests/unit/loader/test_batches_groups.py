"""Small batches of a fast consumer, gathered together: when, and that each is as if it had been gathered alone."""

from __future__ import annotations

import io
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_data import ROWS, flat, labels, plain

from interrupted_loops import Interrupted, InterruptedAt
from legroom.loader.batches import batch_iterator, cpu_gather
from legroom.loader.batches.cpu_gather import HostGatherer
from legroom.loader.batches.legroom_open import Data
from legroom.loader.rank_sampler import permutation

BYTES = 4 * 3 * 4 + 8  # of a row
FILES = batch_iterator.__file__, cpu_gather.__file__


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return plain(tmp_path, monkeypatch)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each group has had; no consumer is slow, also where it waits for a core."""
    found: list[int] = []
    gather_group = HostGatherer._gather_group

    def counted(self: HostGatherer, rows: Any) -> Any:
        batches = gather_group(self, rows)
        found.append(len(batches))
        return batches

    monkeypatch.setattr(HostGatherer, "_gather_group", counted)
    monkeypatch.setattr(batch_iterator, "_HANDOVER", 1e9)
    return found


def test_a_fast_consumer_gets_small_batches_in_groups(data: Data, groups: list[int]) -> None:
    assert flat(labels(data.batches(2, shuffle=True))) == permutation(ROWS, 0, 0).tolist()
    # The first two batches are measured; then groups of the largest size, once to the middle and once to the end.
    assert groups == [16, 7, 16, 7]


def test_a_slow_consumer_gets_none(data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_iterator, "_HANDOVER", -1.0)
    monkeypatch.setattr(batch_iterator, "prefetch_pays", lambda *_: False)
    assert flat(labels(data.batches(2))) == list(range(ROWS))
    assert groups == []


def test_a_consumer_is_measured_again_after_some_groups(
    data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gather, "_LARGEST_GROUP", 2)
    measured: list[float] = []
    is_slow = batch_iterator.Prefetcher._is_slow

    def counted(self: batch_iterator.Prefetcher, seconds: float) -> bool:
        measured.append(seconds)
        return is_slow(self, seconds)

    monkeypatch.setattr(batch_iterator.Prefetcher, "_is_slow", counted)
    assert flat(labels(data.batches(2))) == list(range(ROWS))
    # Two batches alone, of which the second is measured, then eight groups of two. Two more, then up to sixteen groups.
    assert len(measured) == 2 and groups == [2] * (8 + 14)


@pytest.mark.parametrize("limit", [0, 2 * 4 * BYTES - 1])
def test_large_batches_are_gathered_one_by_one(
    data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch, limit: int
) -> None:
    monkeypatch.setattr(cpu_gather, "_MOST_GROUPED", limit)
    assert flat(labels(data.batches(4))) == list(range(ROWS))
    assert groups == []


def test_a_group_is_bounded_in_bytes(data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "_MOST_GROUPED", 3 * 4 * BYTES + 1)
    assert flat(labels(data.batches(4))) == list(range(ROWS))
    assert max(groups) == 3


def test_text_is_gathered_one_by_one_and_transforms_are_applied_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    import h5py

    data = plain(tmp_path, monkeypatch, text=np.array([b"a%d" % i for i in range(ROWS)], dtype=h5py.string_dtype()))
    found = [text for batch in data.batches(2, keys="text") for text in batch["text"]]
    assert [str(text) for text in found] == [f"a{i}" for i in range(ROWS)] and groups == []
    seen: list[int] = []

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(seen))
        return dict(batch)

    for number, batch in enumerate(data.batches(2, keys=["images", "labels"], transform=transform)):
        assert batch["labels"].tolist() == [2 * number, 2 * number + 1][: ROWS - 2 * number]
        assert len(seen) == number + 1  # not before the batch is asked for
    assert sum(groups) > 40


@pytest.mark.parametrize("world", [1, 2, 3])
@pytest.mark.parametrize("rows", [None, slice(10, -10), [5, 1, 1, 80, *range(20, 60)]])
@pytest.mark.parametrize("shuffle", [False, True])
def test_ranks_and_chosen_rows_get_the_same_batches(
    data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch, world: int, rows: Any, shuffle: bool
) -> None:
    for uneven in ("pad", "drop", "all"):
        for rank in range(world):
            options: dict[str, Any] = {"rank": rank, "world_size": world, "rows": rows, "uneven": uneven, "epoch": 1}
            together = labels(data.batches(2, shuffle=shuffle, **options))
            assert len(groups) > 0
            with monkeypatch.context() as alone:
                alone.setattr(batch_iterator._EpochBatches, "whole_batches", lambda *_: None)
                assert together == labels(data.batches(2, shuffle=shuffle, **options))
            groups.clear()


def test_a_state_within_a_group_counts_what_was_given_out(data: Data, groups: list[int]) -> None:
    whole = labels(data.batches(3, shuffle=True, epoch=0))
    for stop in range(1, len(whole)):
        batches = data.batches(3, shuffle=True, epoch=0)
        first = labels(batches, stop)
        again = data.batches(3, shuffle=True, epoch=0)
        again.load_state_dict(json.loads(json.dumps(batches.state_dict())))
        assert first + labels(again) == whole
    assert len(groups) > 10


def test_batches_of_a_group_share_nothing_that_shows(data: Data, groups: list[int]) -> None:
    kept = list(data.batches(2, shuffle=True))
    assert groups
    before = [batch["images"].clone() for batch in kept]
    kept[10]["images"].fill_(-1)
    kept[10]["labels"].add_(1000)
    assert all(torch.equal(kept[i]["images"], before[i]) for i in range(len(kept)) if i != 10)
    assert sorted(flat([batch["labels"].tolist() for i, batch in enumerate(kept) if i != 10])) != list(range(ROWS))
    for batch in kept:
        for tensor in batch.values():
            assert tensor.untyped_storage().nbytes() == tensor.nbytes and tensor._version < 2
    saved = io.BytesIO()
    torch.save(kept[5]["images"], saved)
    assert saved.tell() < 3000  # not the group's 16 batches


def test_memory_of_a_group_is_reused_after_its_last_batch(
    data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cpu_gather, "_FEW_ROWS", 0)  # as for a group of more rows than that: into a buffer
    held, addresses = [], []
    for number, batch in enumerate(data.batches(2, keys=["images"])):
        addresses.append(batch["images"].data_ptr())
        if number == 5:
            held.append((batch["images"].numpy()[1:], batch["images"].numpy()[1:].copy()))
    assert groups == [16, 16, 14]
    assert all((part == copy).all() for part, copy in held)
    assert addresses[2] not in addresses[3:]  # the first group is still held, through one of its batches
    del held, batch
    again = [batch["images"].data_ptr() for batch in data.batches(2, keys=["images"])]
    assert again[2] == again[34]  # of the first and the third group: the loop holds one batch of the second meanwhile


def test_a_group_that_is_interrupted_is_repeated(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_iterator, "_HANDOVER", 1e9)
    calls, gather_group = [], HostGatherer._gather_group

    def interrupted(self: HostGatherer, rows: Any) -> Any:
        calls.append(len(rows))
        if len(calls) % 2:
            raise Interrupted
        return gather_group(self, rows)

    monkeypatch.setattr(HostGatherer, "_gather_group", interrupted)
    batches = data.batches(2, shuffle=True)
    loop, found, interruptions = iter(batches), [], 0
    while True:
        before = batches.state_dict()
        try:
            found += next(loop)["labels"].tolist()
        except Interrupted:
            interruptions += 1
            assert batches.state_dict() == before
        except StopIteration:
            break
    assert found == permutation(ROWS, 0, 0).tolist() and interruptions == 4


@pytest.mark.parametrize("handover", [1e9, -1.0])
def test_a_stop_iteration_of_a_transform_does_not_look_like_the_end(
    data: Data, monkeypatch: pytest.MonkeyPatch, handover: float
) -> None:
    monkeypatch.setattr(batch_iterator, "_HANDOVER", handover)  # a fast consumer, and a slow one
    seen: list[int] = []

    def transform(batch: dict[str, Any]) -> dict[str, Any]:
        seen.append(len(seen))
        if len(seen) == 20:
            raise StopIteration
        return batch

    batches = data.batches(2, transform=transform)
    loop, found = iter(batches), []
    with pytest.raises(RuntimeError, match="StopIteration"):
        while True:
            found += next(loop)["labels"].tolist()
    assert found == list(range(38)) and batches.state_dict()["position"] == 38
    assert found + flat(labels(loop)) == list(range(ROWS))


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="raises from a trace function")
@pytest.mark.parametrize("handover", [1e9, -1.0])
@pytest.mark.parametrize("transform", [None, dict])
def test_an_interruption_at_any_line_loses_no_batch(
    data: Data, monkeypatch: pytest.MonkeyPatch, handover: float, transform: Any
) -> None:
    monkeypatch.setattr(batch_iterator, "_HANDOVER", handover)
    monkeypatch.setattr(batch_iterator, "prefetch_pays", lambda *_: False)
    monkeypatch.setattr(batch_iterator, "_LEAST_PREPARED", 10)
    expected, interruptions = permutation(ROWS, 0, 0).tolist(), 0
    batches = data.batches(5, shuffle=True, epoch=0, transform=transform)
    for number in range(1, 800, 3 if handover < 0 else 1):
        loop, found, ends = iter(batches), list[int](), InterruptedAt(number, *FILES)
        while True:
            try:
                with ends:
                    batch = next(loop)
            except Interrupted:
                interruptions += 1
                assert batches.state_dict()["position"] % ROWS == len(found) % ROWS  # or the next epoch's
                continue
            except StopIteration:
                break
            found += batch["labels"].tolist()
            assert batches.state_dict()["position"] == len(found)
        assert found == expected, number
    assert interruptions > 100


@pytest.mark.skipif(sys.implementation.name != "cpython", reason="raises from a trace function")
@pytest.mark.parametrize("given", [None, 0])
def test_an_interruption_of_iter_leaves_the_position_to_the_next_loop(data: Data, given: int | None) -> None:
    whole = data.batches(2, shuffle=True, epoch=0)
    first = labels(whole, 15)
    state, interruptions = whole.state_dict(), 0
    for number in range(1, 60):
        batches = data.batches(2, shuffle=True, epoch=given)
        batches.load_state_dict(state)
        try:
            with InterruptedAt(number, *FILES):
                loop = iter(batches)
        except Interrupted:
            interruptions += 1
            assert batches.state_dict() == state
            loop = iter(batches)
        assert flat(first) + flat(labels(loop)) == permutation(ROWS, 0, 0).tolist()
    assert interruptions > 10


def test_the_rows_of_large_batches_of_small_rows_are_looked_up_in_pieces(
    data: Data, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    monkeypatch.setattr(batch_iterator, "_MOST_NUMBERS", 7)
    monkeypatch.setattr(cpu_gather, "_LARGEST_GROUP", 2)
    taken: list[int] = []
    whole_batches = batch_iterator._EpochBatches.whole_batches

    def counted(self: batch_iterator._EpochBatches, position: int, most: int) -> Any:
        taken.append(most)
        return whole_batches(self, position, most)

    monkeypatch.setattr(batch_iterator._EpochBatches, "whole_batches", counted)
    assert flat(labels(data.batches(2))) == list(range(ROWS))
    assert max(taken) == 3 and groups


def test_the_next_order_is_prepared_when_the_middle_is_given_out(
    data: Data, groups: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batch_iterator, "_LEAST_PREPARED", 10)
    prepared: list[tuple[int, Any]] = []
    prepare = batch_iterator.EpochOrders.prepare

    def counted(self: batch_iterator.EpochOrders, epoch: int) -> None:
        prepared.append((epoch, batches.state_dict()["position"]))
        prepare(self, epoch)

    monkeypatch.setattr(batch_iterator.EpochOrders, "prepare", counted)
    batches = data.batches(2, shuffle=True)
    for epoch in range(3):
        assert flat(labels(batches)) == permutation(ROWS, 0, epoch).tolist()
    assert prepared == [(1, 50), (2, 50), (3, 50)]
