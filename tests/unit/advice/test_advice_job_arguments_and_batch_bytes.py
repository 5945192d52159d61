"""What is asked about: batches from files and from figures, models on the host, and nonsense refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from machines import MB

from legroom.advice.job_settings_to_workload import (
    Batch,
    Demand,
    batch_of,
    data_rows,
    host_model,
    loaders_of,
    workload_of,
)
from legroom.errors import UnknownFormat, UnsupportedData, UsageError


@pytest.mark.parametrize(
    "nonsense",
    [
        {"num_workers": -1},
        {"prefetch_factor": 0},
        {"ranks": 0},
        {"per_process": -1},
        {"process_ram": -5},
        {"val_workers": -1},
        {"val_batch": 0},
        {"optimizer": "magic"},
        {"dtype": "float12"},
        {"num_workers": True},
        {"num_workers": 1.5},
    ],
)
def test_nonsense_is_refused(nonsense: dict[str, object]) -> None:
    with pytest.raises(UsageError) as caught:
        Demand(**nonsense)  # type: ignore[arg-type]
    assert caught.value.exit_status == 2 and caught.value.fix


@pytest.mark.parametrize(("sample", "samples"), [(0, 8), (-1, 8), (8, 0), (8, -3), (8, True)])
def test_a_batch_holds_something(sample: int, samples: int) -> None:
    with pytest.raises(UsageError):
        batch_of(sample, samples)


def test_a_validation_loader_lives_beside() -> None:
    train, val = loaders_of(Demand(num_workers=4, val_workers=2, val_batch=4), batch_of(MB, 16))
    assert train.tensors == (16 * MB,) and train.num_workers == 4
    assert val.tensors == (4 * MB,) and val.num_workers == 2 and val.batches is None
    assert len(loaders_of(Demand(num_workers=4), batch_of(MB, 16))) == 1
    assert loaders_of(Demand(), None) == ()


def test_an_epochs_batches_are_shared_by_ranks() -> None:
    batch = Batch((100,), 10, "here", rows=105)
    assert loaders_of(Demand(), batch)[0].batches == 11
    assert loaders_of(Demand(ranks=4), batch)[0].batches == 3


@pytest.mark.parametrize(
    ("optimizer", "dtype", "each"),
    [("none", "float32", 4), ("sgd", "float32", 8), ("momentum", "float32", 12), ("adam", "float32", 16),
     ("adamw", "bfloat16", 8)],
)  # fmt: skip
def test_a_model_on_the_host(optimizer: str, dtype: str, each: int) -> None:
    demand = Demand(params=125_000_000, optimizer=optimizer, dtype=dtype)
    assert host_model(demand)[0] == 125_000_000 * each
    assert workload_of(demand, None, 2).host_model == 125_000_000 * each


def test_rows_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "train.npz"
    np.savez(
        path, images=np.zeros((100, 8, 8, 3), np.uint8), labels=np.zeros(100, np.int64), mean=np.zeros(3, np.float32)
    )
    rows = data_rows(path)
    assert rows.rows == 100 and rows.left_out == ("mean",) and not rows.uneven
    batch = rows.batch(16)
    assert sorted(batch.tensors) == [16 * 8, 16 * 192] and batch.rows == 100
    assert "train.npz" in batch.source
    assert data_rows(path, ["labels"]).batch(4).tensors == (32,)
    with pytest.raises(UsageError):
        rows.batch(0)


def test_rows_of_a_table_are_averages(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    path = tmp_path / "t.parquet"
    pq.write_table(pa.table({"a": list(range(1000)), "text": ["x" * 100] * 1000}), path)
    rows = data_rows(path)
    assert rows.rows == 1000 and rows.uneven and len(rows.tensors) == 2
    assert sum(rows.batch(1000).tensors) >= 100 * 1000


def test_a_file_without_rows(tmp_path: Path) -> None:
    path = tmp_path / "scalar.npy"
    np.save(path, np.float32(3))
    with pytest.raises(UnsupportedData):
        data_rows(path)


def test_a_pattern_stands_for_all_of_its_shards(tmp_path: Path) -> None:
    for number, rows in enumerate((3, 5)):
        np.save(tmp_path / f"s-{number}.npy", np.zeros((rows, 4)))
    found = data_rows(f"{tmp_path}/s-*.npy")
    assert (found.rows, found.tensors, found.nbytes, found.uneven) == (8, (32,), 256, False)
    np.savez(tmp_path / "s-2.npz", x=np.zeros((1, 4)), y=np.zeros(1))
    with pytest.raises(UnsupportedData, match="different columns"):
        data_rows(f"{tmp_path}/s-*")


def test_an_empty_array_and_a_flat_file_of_tokens_say_what_helps(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.zeros((0, 4)))
    with pytest.raises(UnsupportedData) as caught:
        data_rows(tmp_path / "x.npy")
    assert caught.value.why == "its arrays have 0 rows"
    np.arange(1000, dtype="uint16").tofile(tmp_path / "x.bin")
    with pytest.raises(UnknownFormat) as unknown:
        data_rows(tmp_path / "x.bin")
    assert "sample_bytes=" in unknown.value.fix[0] and "dtype=" not in str(unknown.value)
