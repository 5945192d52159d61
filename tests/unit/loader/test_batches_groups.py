"""Small batches of a fast consumer, gathered together: when, and that each is as if it had been gathered alone."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from batch_data import ROWS, flat, labels, plain

from legroom.loader.batches import batch_iterator, cpu_gather
from legroom.loader.batches.cpu_gather import HostGatherer
from legroom.loader.batches.legroom_open import Data
from legroom.loader.rank_sampler import permutation

BYTES = 4 * 3 * 4 + 8  # of a row


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return plain(tmp_path, monkeypatch)


@pytest.fixture
def groups(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many batches each group has had; no consumer is slow, also where it waits for a core."""
    found: list[int] = []
    gather_group = HostGatherer.gather_group

    def counted(self: HostGatherer, rows: Any, size: int) -> Any:
        batches = gather_group(self, rows, size)
        found.append(len(batches))
        return batches

    monkeypatch.setattr(HostGatherer, "gather_group", counted)
    monkeypatch.setattr(batch_iterator, "_HANDOVER", 1e9)
    return found


def test_a_fast_consumer_gets_small_batches_in_groups(data: Data, groups: list[int]) -> None:
    assert flat(labels(data.batches(2, shuffle=True))) == permutation(ROWS, 0, 0).tolist()
    # The first two batches are measured; then groups of the largest size, and what is left of the whole batches.
    assert groups == [16, 16, 14]


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
    # Two batches alone, of which the second is measured, then eight groups of two: 18 batches. 49 are 18 + 18 + 13.
    assert len(measured) == 3 and groups == [2] * (8 + 8 + 5)


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
    assert set(groups) == {3, 2} or set(groups) == {3}


def test_text_ragged_rows_and_transforms_are_gathered_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, groups: list[int]
) -> None:
    import h5py

    data = plain(tmp_path, monkeypatch, text=np.array([b"a%d" % i for i in range(ROWS)], dtype=h5py.string_dtype()))
    found = [text for batch in data.batches(2, keys="text") for text in batch["text"]]
    assert [str(text) for text in found] == [f"a{i}" for i in range(ROWS)] and groups == []
    assert flat(labels(data.batches(2, keys=["images", "labels"], transform=dict))) == list(range(ROWS))
    assert groups == []


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
                alone.setattr(batch_iterator._EpochBatches, "gather_group", lambda *_: False)
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


def test_memory_of_a_group_is_reused_after_its_last_batch(data: Data, groups: list[int]) -> None:
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


class Interrupted(BaseException):
    pass


def test_a_group_that_is_interrupted_is_repeated(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch_iterator, "_HANDOVER", 1e9)
    calls, gather_group = [], HostGatherer.gather_group

    def interrupted(self: HostGatherer, rows: Any, size: int) -> Any:
        calls.append(len(rows))
        if len(calls) % 2:
            raise Interrupted
        return gather_group(self, rows, size)

    monkeypatch.setattr(HostGatherer, "gather_group", interrupted)
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
    assert found == permutation(ROWS, 0, 0).tolist() and interruptions == 3


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
