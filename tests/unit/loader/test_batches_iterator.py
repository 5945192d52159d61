"""data.batches: what comes out, epochs, stopping and resuming, bad input."""

from __future__ import annotations

import json
import os
import pickle
import re
import sys
import tarfile
import threading
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import h5py
import numpy as np
import pytest
import torch
from batch_data import ROWS, flat, labels, plain, write
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import legroom
from legroom.errors import MissingKey, MissingPackage, UnsupportedData, UsageError
from legroom.loader.batches import batch_iterator
from legroom.loader.batches.legroom_open import Data
from legroom.loader.rank_sampler import permutation


@pytest.fixture
def data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Data:
    return plain(tmp_path, monkeypatch)


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Data:
    with pytest.MonkeyPatch.context() as patch:  # ends here: other tests of the module open through the cache
        return plain(tmp_path_factory.mktemp("rows"), patch)


def test_batches_in_order(data: Data) -> None:
    batches = data.batches(10)
    found = list(batches)
    assert len(batches) == len(found) == 10
    assert list(found[0]) == ["images", "labels"]
    assert isinstance(found[0]["images"], torch.Tensor) and found[0]["images"].dtype is torch.float32
    assert found[0]["images"].shape == (10, 4, 3) and found[-1]["images"].shape == (7, 4, 3)
    assert labels(batches) == [list(range(at, min(at + 10, ROWS))) for at in range(0, ROWS, 10)]
    assert len(labels(data.batches(10, drop_last=True))) == 9
    assert (batches.path, batches.why) == ("cpu", "no device was given")


def test_an_epoch_without_batches_is_reported(data: Data, caplog: pytest.LogCaptureFixture) -> None:
    short: dict[str, Any] = {"rows": range(7), "drop_last": True}
    assert len(data.batches(7, **short)) == 1 and len(data.batches(8, rows=range(7))) == 1
    assert len(data.batches(4, **short, rank=1, world_size=2)) == 1  # padded by a row
    assert len(data.batches(1, rows=range(1), rank=1, world_size=2, uneven="all")) == 0  # its rows are all given out
    assert not caplog.messages
    assert list(data.batches(8, **short)) == []
    (text,) = caplog.messages
    assert "batch_size=8 is more than the 7 rows of each rank" in text and "batch_size=7 or less" in text
    for uneven, each in (("pad", 4), ("drop", 3)):
        caplog.clear()
        assert len(data.batches(5, **short, rank=1, world_size=2, uneven=uneven)) == 0
        assert f"batch_size={each} or less" in caplog.text
    caplog.clear()
    assert len(data.batches(1, rows=range(3), rank=0, world_size=4, uneven="drop")) == 0
    assert "3 rows for 4 ranks" in caplog.text and "uneven='pad'" in caplog.text


def test_numpy_and_transform(data: Data) -> None:
    batch = next(iter(data.batches(3, format="numpy", keys="labels", transform=lambda b: b["labels"] * 2)))
    assert isinstance(batch, np.ndarray) and batch.tolist() == [0, 2, 4]


def test_the_data_are_not_written_to_through_a_batch(data: Data) -> None:
    for batch in data.batches(97):
        batch["images"].zero_()
    assert data["images"][5, 0, 0] == 5


def test_the_next_order_is_computed_in_the_second_half_of_an_epoch(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    computed: list[tuple[int, bool]] = []

    def counting(rows: int, seed: int, epoch: int) -> Any:
        computed.append((epoch, threading.current_thread() is threading.main_thread()))
        return permutation(rows, seed, epoch)

    monkeypatch.setattr(batch_iterator, "permutation", counting)
    monkeypatch.setattr(batch_iterator, "_LEAST_PREPARED", 10)
    batches = data.batches(10, shuffle=True)
    found = [labels(batches) for _ in range(3)]
    assert [flat(epoch) for epoch in found] == [permutation(ROWS, 0, epoch).tolist() for epoch in range(3)]
    assert computed[:3] == [(0, True), (1, False), (2, False)]
    while (3, False) not in computed:  # begun in the last of the three
        time.sleep(0.001)
    computed.clear()
    early = data.batches(10, shuffle=True, epoch=7)
    for _ in range(4):  # not before the middle: a loop may be left
        assert flat(labels(early, 4)) == permutation(ROWS, 0, 7)[:40].tolist()
    assert [epoch for epoch, here in computed if not here] == []


@pytest.mark.parametrize("how", ["another epoch", "a forked child", "too little memory", "no thread"])
def test_an_order_that_was_not_prepared_is_computed(monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    monkeypatch.setattr(batch_iterator, "_LEAST_PREPARED", 10)
    orders = batch_iterator.EpochOrders(50, 3)
    wanted = permutation(50, 3, 1).tolist()
    if how == "too little memory":
        monkeypatch.setattr(batch_iterator, "permutation", Mock(side_effect=MemoryError))
    if how == "no thread":
        monkeypatch.setattr(batch_iterator.Task, "start", lambda _: False)
    orders.prepare(2 if how == "another epoch" else 1)
    if how == "too little memory":
        assert orders._next is not None
        while not orders._next[2].ready:
            time.sleep(0.001)
        monkeypatch.undo()
    if how == "a forked child":
        monkeypatch.setattr(os, "getpid", lambda: 1)  # the thread is the parent's
    assert orders.take(1).tolist() == wanted


class RecordingGatherer:
    """Stands in for one of the GPU: the rows of each batch, and which batches were begun before they were asked for."""

    path, why = "cuda-kernel", ""

    def __init__(self, ahead: int) -> None:
        self.ahead = ahead
        self.begun: list[Any] = []
        self.waited_for: list[list[int]] = []

    def begin(self, rows: Any) -> None:
        self.begun.append(rows)
        assert len(self.begun) <= self.ahead

    def gather(self, rows: Any) -> dict[str, Any]:
        if any(begun is rows for begun in self.begun):
            self.begun = [begun for begun in self.begun if begun is not rows]
        else:
            self.begun.clear()
            self.waited_for.append(rows.tolist())
        return {"labels": rows}


@pytest.fixture
def on_gpu(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> RecordingGatherer:
    gatherer = RecordingGatherer(getattr(request, "param", 1))
    monkeypatch.setattr(batch_iterator, "gatherer_for", lambda *_: gatherer)
    return gatherer


@pytest.mark.parametrize("on_gpu", [1, 2, 5, 12], indirect=True)
@pytest.mark.parametrize("set_epochs", [False, True])
def test_only_the_first_epoch_begins_with_a_wait(data: Data, on_gpu: RecordingGatherer, set_epochs: bool) -> None:
    batches = data.batches(10, shuffle=True, device="cuda", epoch=0 if set_epochs else None)
    for epoch in range(3):
        if set_epochs:
            batches.set_epoch(epoch)
        found = [batch["labels"].tolist() for batch in batches]
        assert flat(found) == permutation(ROWS, 0, epoch).tolist()
        assert batches.state_dict()["position"] == 0
    assert on_gpu.waited_for == [permutation(ROWS, 0, 0)[:10].tolist()]


@pytest.mark.parametrize("change", ["an epoch again", "a state", "another loop over the data"])
def test_an_epoch_that_does_not_follow_is_right_too(data: Data, on_gpu: RecordingGatherer, change: str) -> None:
    batches = data.batches(10, shuffle=True, device="cuda", epoch=4 if change == "an epoch again" else None)
    state = batches.state_dict()
    first = [batch["labels"].tolist() for batch in batches]
    if change == "a state":
        batches.load_state_dict({**state, "epoch": 9, "position": 20})
    elif change == "another loop over the data":
        data.next_epoch = 7
    expected = {"an epoch again": flat(first), "a state": permutation(ROWS, 0, 9)[20:].tolist()}
    found = flat([batch["labels"].tolist() for batch in batches])
    assert found == expected.get(change, permutation(ROWS, 0, 7).tolist())
    assert on_gpu.begun == []  # a guess that was wrong is not repeated


def test_rows_in_order_begin_no_next_epoch(data: Data, on_gpu: RecordingGatherer) -> None:
    """An evaluation that is over must not keep a batch in GPU memory while the training continues."""
    batches = data.batches(10, device="cuda")
    for _ in range(2):
        assert len(list(batches)) == 10 and on_gpu.begun == []


def test_order_is_a_function_of_seed_and_epoch(data: Data) -> None:
    for _ in range(2):
        found = flat(labels(data.batches(7, shuffle=True, seed=3, epoch=4)))
        assert found == permutation(ROWS, 3, 4).tolist()


def test_epochs_advance_over_the_data(data: Data) -> None:
    seen = [flat(labels(data.batches(16, shuffle=True))) for _ in range(3)]
    assert seen == [permutation(ROWS, 0, epoch).tolist() for epoch in range(3)]
    again = data.batches(16, shuffle=True)
    assert [flat(labels(again)) for _ in range(2)] == [permutation(ROWS, 0, e).tolist() for e in (3, 4)]
    labels(data.batches(16))  # a loop without an order does not count
    assert data.next_epoch == 5


def test_a_set_epoch_stays(data: Data) -> None:
    batches = data.batches(16, shuffle=True, epoch=2)
    assert labels(batches) == labels(batches)
    batches.set_epoch(6)
    assert flat(labels(batches)) == permutation(ROWS, 0, 6).tolist()
    assert data.next_epoch == 0


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chance=st.data())
def test_interrupted_or_not_is_the_same(shared: Data, chance: st.DataObject) -> None:
    size, world = chance.draw(st.integers(1, 30)), chance.draw(st.integers(1, 4))
    options: dict[str, Any] = {
        "shuffle": chance.draw(st.booleans()),
        "seed": chance.draw(st.integers(0, 9)),
        "uneven": chance.draw(st.sampled_from(["pad", "drop", "all"])),
        "drop_last": chance.draw(st.booleans()),
        "world_size": world,
        "rank": chance.draw(st.integers(0, world - 1)),
        "rows": chance.draw(st.sampled_from([None, slice(10, -10), range(90, 3, -3), [5, 1, 1, 80, *range(20, 40)]])),
    }
    whole: list[list[int]] = []
    shared.next_epoch = 5
    for _ in range(2):
        whole += labels(shared.batches(size, **options))
    shared.next_epoch = 5
    parts: list[list[int]] = []
    batches = shared.batches(size, **options)
    for _ in range(chance.draw(st.integers(0, 4))):
        parts += labels(batches, chance.draw(st.integers(0, len(batches))))
        state = json.loads(json.dumps(batches.state_dict()))
        shared.next_epoch = 0  # as in a new process
        batches = shared.batches(size, **options)
        batches.load_state_dict(state)
    while len(parts) < len(whole):
        parts += labels(batches, len(whole) - len(parts))
    assert parts == whole


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(chance=st.data())
def test_every_row_once_with_any_world_sizes(shared: Data, chance: st.DataObject) -> None:
    state: dict[str, Any] | None = None
    seen: list[int] = []
    for stop in [*chance.draw(st.lists(st.integers(0, 4), max_size=4)), None]:
        world, size = chance.draw(st.integers(1, 5)), chance.draw(st.integers(1, 20))
        after = None
        for rank in range(world):
            batches = shared.batches(size, shuffle=True, seed=1, epoch=3, uneven="all", rank=rank, world_size=world)
            if state is not None:
                batches.load_state_dict(state)
            loop = iter(batches)
            for _ in range(1000 if stop is None else stop):
                if (batch := next(loop, None)) is None:
                    break
                seen += batch["labels"].tolist()
            after = after or batches.state_dict()
        state = after
        if state["position"] == 0 and seen:  # the epoch ended before the stop
            break
    assert sorted(seen) == list(range(ROWS))


def test_state_counts_returned_batches(data: Data) -> None:
    batches = data.batches(10, shuffle=True)
    assert batches.state_dict()["position"] == 0
    loop = iter(batches)
    for number in range(1, 4):
        next(loop)
        assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (0, 10 * number)
    for _ in loop:
        pass
    assert (batches.state_dict()["epoch"], batches.state_dict()["position"]) == (1, 0)


def test_a_loaded_epoch_may_be_set_again(data: Data) -> None:
    batches = data.batches(10, shuffle=True, epoch=4)
    taken = labels(batches, 3)
    again = data.batches(10, shuffle=True)
    again.load_state_dict(batches.state_dict())
    again.set_epoch(4)
    assert flat(taken + labels(again)) == permutation(ROWS, 0, 4).tolist()
    again.load_state_dict(batches.state_dict())
    again.set_epoch(5)  # another epoch begins at its beginning
    assert flat(labels(again)) == permutation(ROWS, 0, 5).tolist()


def test_states_of_other_data_or_orders_are_refused(data: Data, tmp_path: Path) -> None:
    state = data.batches(10, shuffle=True, seed=1).state_dict()
    for options, words in (({"seed": 2}, "seed=1"), ({"shuffle": False, "seed": 1}, "shuffle=True")):
        with pytest.raises(UsageError, match=words):
            data.batches(10, **{"shuffle": True, **options}).load_state_dict(state)
    batches = data.batches(10, shuffle=True, seed=1)
    for change in (
        {"rows": 96}, {"columns": ["images float64[97, 4, 3]"]}, {"version": 2}, {"position": 98}, {"epoch": -1}
    ):  # fmt: skip
        with pytest.raises(UsageError, match="state"):
            batches.load_state_dict({**state, **change})
    with pytest.raises(UsageError, match="not a state_dict"):
        batches.load_state_dict({"step": 3})
    batches.load_state_dict({**state, "digest": "md5:0123"})  # here nothing was hashed: the columns decide


def test_a_state_of_the_cache_needs_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LEGROOM_SHM", "LEGROOM_DIR"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    path = write(tmp_path)
    with legroom.open(path) as data:
        batches = data.batches(10)
        taken = labels(batches, 4)
        state = batches.state_dict()
        assert state["digest"].startswith("md5:")
        copy = pickle.loads(pickle.dumps(batches))
        assert labels(copy) == labels(data.batches(10))
    with legroom.open(path, backing="inplace") as data:
        batches = data.batches(10)
        batches.load_state_dict(state)
        assert flat(taken + labels(batches)) == list(range(ROWS))
    with h5py.File(path, "r+") as file:
        file["images"][0] = 1
    with legroom.open(path) as data, pytest.raises(UsageError, match="other data"):
        data.batches(10).load_state_dict(state)


def test_two_loops_at_once_and_a_loop_left_early(data: Data) -> None:
    batches = data.batches(9, shuffle=True, epoch=1)
    for one, other in zip(batches, batches, strict=True):
        assert torch.equal(one["labels"], other["labels"])
    for _ in batches:
        break
    assert flat(labels(batches)) == permutation(ROWS, 0, 1).tolist()


def test_a_batch_whose_transform_fails_is_not_lost(data: Data) -> None:
    calls: list[int] = []

    def fails_once(batch: dict[str, Any]) -> dict[str, Any]:
        calls.append(1)
        if len(calls) == 2:
            raise RuntimeError("once")
        return batch

    loop = iter(data.batches(50, transform=fails_once))
    assert next(loop)["labels"][0] == 0
    with pytest.raises(RuntimeError, match="once"):
        next(loop)
    assert next(loop)["labels"][0] == 50


def test_columns_of_every_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ragged = h5py.vlen_dtype(np.int32)
    path = write(tmp_path, rows=4, ids=np.array([b"a", b"bb", b"c", b"d"]), empty=np.zeros((4, 0)))
    with h5py.File(path, "r+") as file:
        lists = file.create_dataset("lists", (4,), ragged)
        for row in range(4):
            lists[row] = np.arange(row, dtype=np.int32)
        file.create_dataset("words", data=["null", "eins", "zwei", "drei"], dtype=h5py.string_dtype())
        file["complex"] = np.arange(4) * 1j
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    batch = next(iter(legroom.open(path).batches(3, rank=1, world_size=2, uneven="all")))
    assert batch["labels"].tolist() == [2, 3]
    assert [row.tolist() for row in batch["lists"]] == [[0, 1], [0, 1, 2]]
    assert isinstance(batch["lists"][0], torch.Tensor)
    assert batch["words"] == ["zwei", "drei"]
    assert batch["ids"].tolist() == [b"c", b"d"]  # torch has no texts: an array
    assert batch["empty"].shape == (2, 0) and batch["complex"].dtype is torch.complex128


def test_columns_of_tables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    table = pa.table({"x": np.arange(10.0), "y": np.arange(10)})
    pq.write_table(table, tmp_path / "numbers.parquet")
    data = legroom.open(tmp_path / "numbers.parquet")
    batches = data.batches(4, shuffle=True, epoch=0)
    assert flat(batch["y"].tolist() for batch in batches) == permutation(10, 0, 0).tolist()
    assert next(iter(batches))["x"].dtype is torch.float64
    pq.write_table(table.append_column("t", pa.array(["a"] * 10)), tmp_path / "texts.parquet")
    with pytest.raises(UnsupportedData, match=r"keys=\['x', 'y'\]"):
        legroom.open(tmp_path / "texts.parquet").batches(4)
    assert list(next(iter(legroom.open(tmp_path / "texts.parquet").batches(4, keys=["y"])))) == ["y"]


def test_groups_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "groups.h5"
    with h5py.File(path, "w") as file:
        file["train/x"], file["train/y"], file["test/x"] = np.arange(6), np.arange(6) * 2, np.arange(4)
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    data = legroom.open(path)
    assert sorted(next(iter(data.batches(2, keys="train")))) == ["train/x", "train/y"]
    with pytest.raises(UsageError, match=r"keys=\['train/x', 'train/y'\]"):
        data.batches(2)


def test_no_rows_no_batches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    batches = plain(tmp_path, monkeypatch, rows=0).batches(3, shuffle=True, rank=1, world_size=2)
    assert len(batches) == 0 and list(batches) == []


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"batch_size": 0}, r"batch_size must be an integer >= 1 \(got 0\)"),
        ({"batch_size": -4}, "got -4"),
        ({"batch_size": 2.5}, "got 2.5"),
        ({"batch_size": True}, "got True"),
        ({"seed": -1}, "seed must be an integer >= 0"),
        ({"seed": 2**64}, "seed must be less than"),
        ({"epoch": -1}, "epoch must be an integer >= 0"),
        ({"uneven": "some"}, "pad, drop, all"),
        ({"format": "jax"}, "torch, numpy"),
        ({"rank": 2, "world_size": 2}, "rank=2, world_size=2"),
        ({"rank": 2}, "both rank and world_size"),
        ({"rank": "0", "world_size": 1}, "rank must be an integer"),
        ({"path": "cuda"}, "path must be one of cuda-copy-engine, cuda-kernel, cuda-registered, cuda-pinned"),
        ({"transform": 3}, "must be callable"),
        ({"resident": True}, "resident=True needs a device"),
        ({"format": "numpy", "device": "cuda"}, "cannot be used with device=cuda"),
        ({"device": "mps"}, "mps"),
        ({"keys": []}, "selects nothing"),
    ],
)
def test_arguments_out_of_range_are_usage_errors(data: Data, options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        data.batches(**{"batch_size": 4, **options})
    assert caught.value.fix


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is CUDA here")
def test_an_error_where_cuda_is_missing(data: Data) -> None:
    with pytest.raises(UsageError, match="CUDA is not available") as caught:
        data.batches(4, device="cuda")
    assert caught.value.why and caught.value.fix


def test_names_and_lengths_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = plain(tmp_path, monkeypatch, mean=np.zeros(3))
    with pytest.raises(UsageError, match="mean has 3") as caught:
        data.batches(4)
    assert "keys=['images', 'labels']" in caught.value.fix[0]
    assert len(data.batches(4, keys=["images", "labels"])) == 25
    with pytest.raises(MissingKey, match="did you mean 'labels'"):
        data.batches(4, keys=["images", "lables"])
    scalar = plain(tmp_path, monkeypatch, version=3)
    with pytest.raises(UnsupportedData, match="scalar"):
        scalar.batches(4)
    np.savez(tmp_path / "scalars.npz", a=1, b=2)
    with pytest.raises(UnsupportedData, match="cannot be part of a batch") as caught:
        legroom.open(tmp_path / "scalars.npz").batches(4)
    assert "data['a']" in caught.value.fix[0]  # not keys=[], which is refused
    data.close()
    with pytest.raises(UsageError, match="closed"):
        data.batches(4)


def test_columns_of_text_and_lists_lead_to_a_dataset_of_rows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pa, pq = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    columns = {"text": ["a", "bc"], "y": [1, 2], "ids": [[1], [2, 3]]}
    for name, held in (("all", columns), ("text", {"text": columns["text"]})):
        pq.write_table(pa.table(held), tmp_path / f"{name}.parquet")
        with legroom.open(tmp_path / f"{name}.parquet") as data, pytest.raises(UnsupportedData) as caught:
            data.batches(2)
        code = re.search(r"data\.dataset\(.*\)", " ".join(caught.value.fix))
        assert code is not None and ("keys=['y']" in " ".join(caught.value.fix)) is (name == "all")
        data = legroom.open(tmp_path / f"{name}.parquet")
        assert len(eval(code[0])) == 2 and all("'" + one + "'" in code[0] for one in held)
        assert "a" in eval(code[0])[0]


def test_without_torch(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(MissingPackage, match="format='numpy'"):
        data.batches(4)
    monkeypatch.delitem(sys.modules, "torch.distributed", raising=False)
    assert next(iter(data.batches(4, format="numpy")))["labels"].tolist() == [0, 1, 2, 3]


def test_loops_are_not_pickled_and_batches_are(data: Data) -> None:
    batches = data.batches(4, shuffle=True, epoch=3)
    with pytest.raises(UsageError, match="state_dict"):
        pickle.dumps(iter(batches))
    assert labels(pickle.loads(pickle.dumps(batches))) == labels(batches)
    with pytest.raises((pickle.PicklingError, AttributeError)):
        pickle.dumps(data.batches(4, transform=lambda batch: batch))


def test_ranks_come_from_the_launcher(data: Data, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2")):
        monkeypatch.setitem(os.environ, name, value)
    batches = data.batches(10, uneven="drop")
    assert (batches.sampler.rank, batches.sampler.world_size, len(batches)) == (1, 2, 5)
    assert labels(batches)[0] == list(range(10, 20))


def test_columns_that_a_device_cannot_hold_stay_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[object] = []

    class Device:
        path, why, ahead = "cuda-copy", "a test", 1

        def gather(self, rows: np.ndarray[Any, Any]) -> dict[str, Any]:
            told.append(rows)
            return {"images": ("on the device", rows.tolist()), "labels": rows.tolist()}

        def begin(self, rows: np.ndarray[Any, Any]) -> None:
            told.append(rows)

        def close(self) -> None: ...

    def opened(columns: Any, entry: Any, settings: Any, *, files: Any, types: Any) -> Device:
        told.append((sorted(columns), entry.backing, settings.device, settings.resident, sorted(files)))
        return Device()

    monkeypatch.setattr("legroom.loader.batches.batch_settings.open_gatherer", opened)
    data = plain(tmp_path, monkeypatch, ids=np.array([b"id"] * ROWS))
    batches = data.batches(60, device="cuda:1", resident=True)
    assert told == [(["images", "labels"], "memory", "cuda:1", True, [])]
    first, last = batches
    assert (batches.path, batches.why) == ("cuda-copy", "a test")
    assert sorted(first) == ["ids", "images", "labels"] and first["ids"].tolist() == [b"id"] * 60
    assert last["labels"] == list(range(60, ROWS))
    assert told[2] is told[3]  # the rows that were begun are the ones asked for
    with pytest.raises(UnsupportedData, match="ids"):
        data.batches(60, device="cuda:1", keys="ids")


def test_integers_of_numpy_are_integers(data: Data) -> None:
    small = np.uint8(10)
    batches = data.batches(small, shuffle=True, seed=np.int64(3), epoch=np.int32(1))  # type: ignore[arg-type]
    assert flat(labels(batches)) == permutation(ROWS, 3, 1).tolist()
    state = json.loads(json.dumps(batches.state_dict()))
    batches.load_state_dict(state)


@pytest.mark.parametrize(
    "changed", [{"position": 1.5}, {"position": True}, {"position": "3"}, {"epoch": "a"}, {"epoch": 2**64}]
)
def test_a_state_with_what_is_no_number_is_damaged(data: Data, changed: dict[str, Any]) -> None:
    batches = data.batches(10, shuffle=True)
    with pytest.raises(UsageError, match="damaged"):
        batches.load_state_dict({**batches.state_dict(), **changed})


def test_a_second_path_is_not_taken_for_the_name_of_an_array(tmp_path: Path) -> None:
    first, second = str(tmp_path / "a.npy"), str(tmp_path / "b.npy")
    np.save(first, np.zeros(3)), np.save(second, np.zeros(3))
    with pytest.raises(MissingKey) as caught:
        legroom.open(first, second)
    assert caught.value.fix[0] == f"for several files pass a list: legroom.open([{first!r}, {second!r}])"


def test_columns_that_are_proposed_fit_together(tmp_path: Path) -> None:
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "s.h5", "w") as file:
        file["x"], file["y"], file["empty"], file["n"] = np.zeros((10, 3)), np.zeros(10), np.zeros((0, 2)), 5
    with pytest.raises(UnsupportedData) as caught:
        legroom.open(tmp_path / "s.h5").batches(2, format="numpy")
    assert caught.value.fix[0] == "select the columns: keys=['x', 'y']"


def test_offsets_that_no_file_has_cannot_be_mapped_in_place(tmp_path: Path) -> None:
    with tarfile.open(tmp_path / "x.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("0.jpg"))
    with pytest.raises(UnsupportedData) as caught:
        legroom.open(tmp_path / "x.tar", backing="inplace")
    assert caught.value.why == "no file has it: it is made while the file is loaded" and len(caught.value.fix) == 1
