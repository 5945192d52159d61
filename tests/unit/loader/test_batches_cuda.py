"""The CUDA gatherers against a device made of memory: which path, right rows, right order of events, lifetimes.

What needs a real card is in tests/gpu/test_gpu_batches.py.
"""

from __future__ import annotations

import gc
import os
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_fake import FakeDriver, FakeEvent, FakeStream

from legroom.cache import list_gpu_copies
from legroom.errors import NoRoom, UnsupportedData, UsageError
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches import (
    choose_faster_cuda_path,
    cpu_gather,
    cuda_calls_for_gather,
    cuda_pinned,
    cuda_resident,
)
from legroom.loader.batches.batch_settings import BatchSettings, open_gatherer
from legroom.loader.batches.cuda_calls_for_gather import Driver, open_driver
from legroom.loader.batches.cuda_gather_base import RESOURCES, CudaGatherer, ResourceCache, row_layout
from legroom.loader.rank_sampler import permutation

pytestmark = pytest.mark.skipif(not hasattr(os, "memfd_create"), reason="maps files of shared memory")

DTYPES = [
    "bool",
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]
SHM = SimpleNamespace(backing="shm", key=None, store=None)
DISK = SimpleNamespace(backing="disk", key=None, store=None)

COMPARED = choose_faster_cuda_path.PHASE * choose_faster_cuda_path._PHASES  # batches in which the paths are compared


class Stored:
    """Columns in .npy files, as an entry has them."""

    def __init__(self, folder: Path, **columns: np.ndarray[Any, Any]) -> None:
        self.columns: dict[str, np.ndarray[Any, Any]] = {}
        self.files: dict[str, tuple[Path, int]] = {}
        for name, column in columns.items():
            path = folder / f"{name}.npy"
            np.save(path, column)
            path.chmod(0o400)
            self.columns[name] = np.load(path, mmap_mode="c") if column.size else column
            self.files[name] = path, path.stat().st_size - column.nbytes

    def open(self, driver: FakeDriver, entry: Any = SHM, **options: Any) -> Any:
        settings = BatchSettings(5, device="cuda", **options)
        return open_gatherer(self.columns, entry, settings, files=self.files, driver=driver)  # type: ignore[arg-type]


@pytest.fixture
def stored(tmp_path: Path) -> Iterator[Stored]:
    random = np.random.default_rng(3)
    found = Stored(
        tmp_path,
        images=random.integers(0, 255, (50, 3, 5, 7), np.uint8),  # 105 bytes a row: one by one
        heat=random.random((50, 4, 4), np.float32),
        labels=np.arange(50),
        nothing=np.zeros((50, 0, 3), np.float32),
    )
    yield found
    found.columns.clear()  # pytest holds on to fixtures
    gc.collect()
    assert len(RESOURCES) == 0


def same(batch: dict[str, torch.Tensor], columns: dict[str, np.ndarray[Any, Any]], rows: Any) -> None:
    assert list(batch) == list(columns)
    for name, column in columns.items():
        expected = np.asarray(column)[rows]
        assert batch[name].dtype == torch.from_numpy(expected).dtype and batch[name].shape == expected.shape
        np.testing.assert_array_equal(batch[name].numpy(), expected)


ROWS = np.array([7, 0, 49, 7, 13], np.int64)


# Rows.


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (2, 4)])
def test_rows_come_back_as_what_they_are(name: str, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(1)
    count = int(np.prod(shape)) * 20
    whole = random.integers(0, 2, count).astype(name) if name == "bool" else random.integers(0, 99, count).astype(name)
    column = whole.reshape(20, *shape)
    kind = row_layout("x", column)
    words = torch.index_select(torch.from_numpy(kind.words(column)), 0, torch.as_tensor(ROWS % 20))
    assert words.dtype in (torch.int64, torch.int32, torch.int16, torch.uint8)
    back = kind.restore(words)
    np.testing.assert_array_equal(back.numpy(), column[ROWS % 20])
    assert back.numpy().dtype == column.dtype


def test_rows_of_a_type_that_numpy_has_not(tmp_path: Path) -> None:
    whole = torch.arange(150.0).reshape(50, 3).to(torch.bfloat16)
    stored = Stored(tmp_path, x=whole.view(torch.uint16).numpy())
    options: Any = {"files": stored.files, "types": {"x": torch.bfloat16}}
    for entry, more in ((SHM, {}), (SHM, {"path": "cuda-pinned"}), (DISK, {}), (SHM, {"resident": True})):
        settings = BatchSettings(5, device="cuda", **more)
        gatherer = open_gatherer(stored.columns, entry, settings, driver=FakeDriver(), **options)  # type: ignore[arg-type]
        batch = gatherer.gather(ROWS)
        assert batch["x"].dtype == torch.bfloat16 and torch.equal(batch["x"], whole[torch.from_numpy(ROWS)])
        del gatherer
    stored.columns.clear()
    gc.collect()
    assert len(RESOURCES) == 0


@pytest.mark.parametrize(
    ("nbytes", "address", "width"), [(196608, 128, 8), (12, 64, 4), (6, 64, 2), (105, 64, 1), (8, 4, 4), (8, 3, 1)]
)
def test_the_widest_integer_that_fits(nbytes: int, address: int, width: int) -> None:
    assert row_layout("x", np.empty((2, nbytes), np.uint8)).width(address) == width


@pytest.mark.parametrize("dtype", ["U4", "S3", "datetime64[s]", [("a", "f4"), ("b", "i2")]])
def test_dtypes_that_torch_does_not_have(dtype: Any) -> None:
    with pytest.raises(UnsupportedData, match="labels cannot be copied to a CUDA device"):
        open_gatherer(
            {"labels": np.zeros(3, dtype)}, SHM, BatchSettings(5, device="cuda"), files={}, driver=FakeDriver()
        )  # type: ignore[arg-type]


# Which path, and the right rows on each.


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("path", ["cuda-copy-engine", "cuda-kernel", "cuda-registered"])
def test_rows_from_registered_memory(stored: Stored, path: str, shuffle: bool) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, path=path, shuffle=shuffle)
    assert gatherer.path == path and path in gatherer.why
    assert len(driver.registered) == 3  # a row without bytes needs no map
    assert all(length % 4096 == 0 for length in driver.registered.values())
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    same(gatherer.gather(ROWS[:1]), stored.columns, ROWS[:1])
    same(gatherer.gather(ROWS[:0]), stored.columns, ROWS[:0])
    assert set(driver.sent) == (set() if path == "cuda-copy-engine" else {"side"})
    gatherer.close()


def test_the_copy_engines_copy_consecutive_rows_at_once(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver)
    assert gatherer.path == "cuda-copy-engine" and "consecutive" in gatherer.why
    for rows in (np.arange(5, 45), np.array([3, 4, 5, 9, 8, 7, 7, 8]), np.arange(49, -1, -1)):
        same(gatherer.gather(rows), stored.columns, rows)
    assert driver.copies[:2] == [3, 3 * 5] and sum(driver.copies[2:]) == 3 * 50
    gatherer.close()


@pytest.mark.parametrize("rows", [range(0, 50, 2), range(9, -1, -1), np.array([3, 1, 2])])
def test_chosen_rows_that_are_scattered_are_treated_as_shuffled_ones(stored: Stored, rows: Any) -> None:
    trial = stored.open(FakeDriver(), rows=rows)
    assert "compared in the first" in trial.why
    trial.close()
    one_run = stored.open(FakeDriver(), rows=range(5, 45))
    assert "consecutive" in one_run.why
    one_run.close()


def test_the_cpu_gathers_small_rows_for_the_copy_engines(tmp_path: Path) -> None:
    random = np.random.default_rng(5)
    stored = Stored(tmp_path, images=random.integers(0, 255, (40, 16384), np.uint8), labels=np.arange(40))
    driver = FakeDriver()
    gatherer = stored.open(driver, path="cuda-copy-engine", shuffle=True)
    for rows in random.integers(0, 40, (8, 5)):
        same(gatherer.gather(rows), stored.columns, rows)
        runs = 1 + np.count_nonzero(np.diff(rows) != 1)
        assert driver.copies[-1] == runs + 1
    gatherer.close()


def test_the_first_batches_of_a_shuffled_loop_choose_the_path(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    driver = FakeDriver()
    trial = stored.open(driver, shuffle=True)
    assert "compared in the first" in trial.why
    orders = np.random.default_rng(2).integers(0, 50, (COMPARED + 40, 5))
    paths = []
    for number, rows in enumerate(orders):
        paths.append(trial.path)
        same(trial.gather(rows), stored.columns, rows)
        if number + 1 < len(orders) and number % 3:  # a loop may be left before the next batch is begun
            trial.begin(orders[number + 1])
    assert set(paths) == {"cuda-copy-engine", "cuda-kernel"} and len(set(paths[COMPARED + 2 :])) == 1
    assert "ms per batch" in trial.why
    trial.close()
    assert len(driver.registered) == 3


def play(stored: Stored, driver: FakeDriver, costs: dict[str, float]) -> tuple[Any, list[str]]:
    """A loop whose steps take the GPU so long with each path; the gatherer, and the paths used."""
    gatherer = stored.open(driver, shuffle=True)
    paths: list[str] = []
    for rows in np.random.default_rng(2).integers(0, len(stored.columns["labels"]), (COMPARED + 120, 5)):
        paths.append(gatherer.path)
        driver.gpu_clock += costs[paths[-1]]
        same(gatherer.gather(rows), stored.columns, rows)
    return gatherer, paths


def test_a_later_loop_starts_with_the_choice_and_compares_again(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    driver = FakeDriver()
    first, paths = play(stored, driver, {"cuda-copy-engine": 2.0, "cuda-kernel": 1.5})
    assert paths[0] == "cuda-copy-engine" and set(paths[COMPARED + 2 :]) == {"cuda-kernel"}
    assert "1500.00 ms per batch, with cuda-copy-engine 2000.00 ms" in first.why
    again, paths = play(stored, driver, {"cuda-copy-engine": 2.1, "cuda-kernel": 1.6})
    few = choose_faster_cuda_path.PHASE * choose_faster_cuda_path._PHASES_AGAIN
    assert paths[0] == "cuda-kernel" and set(paths[few + 2 :]) == {"cuda-kernel"}
    assert "1600.00 ms per batch" in again.why
    # Another step, whose times with the path that was chosen are the same.
    other, paths = play(stored, driver, {"cuda-copy-engine": 1.3, "cuda-kernel": 1.6})
    assert paths[0] == "cuda-kernel" and set(paths[COMPARED + few + 2 :]) == {"cuda-copy-engine"}
    for gatherer in (first, again, other):
        gatherer.close()


def test_the_clock_of_the_gpu_decides_not_that_of_the_cpu(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU queues batches of the slower path faster, and the GPU passes its marks long after the CPU."""
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    driver = FakeDriver()
    asked = 0
    late = SimpleNamespace(open=False)

    class LateEvent(FakeEvent):
        def query(self) -> bool:
            nonlocal asked
            asked += 1
            return bool(late.open)

        def synchronize(self) -> None:
            raise AssertionError("nothing is waited for")

    mark = driver.mark

    def late_mark(stream: Any, *, timing: bool = False) -> Any:
        made = mark(stream, timing=timing)
        return LateEvent(driver.log, stream, driver.gpu_clock) if timing else made

    monkeypatch.setattr(driver, "mark", late_mark)
    gatherer = stored.open(driver, shuffle=True)
    costs = {"cuda-copy-engine": 3.0, "cuda-kernel": 3.3}  # of the GPU; the CPU takes no time for either
    for number, rows in enumerate(np.random.default_rng(2).integers(0, 50, (COMPARED + 40, 5))):
        driver.gpu_clock += costs[gatherer.path]
        same(gatherer.gather(rows), stored.columns, rows)
        assert "being compared" in gatherer.why or number > COMPARED + 20
        late.open = number >= COMPARED + 20
    assert asked > 10 and gatherer.path == "cuda-copy-engine" and "3000.00 ms per batch" in gatherer.why
    gatherer.close()


@pytest.mark.parametrize("stop", [0, 1, 20])
def test_a_loop_that_is_left_during_the_trial_releases_both_paths(
    stored: Stored, stop: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    trial = stored.open(FakeDriver(), shuffle=True)
    for _ in range(stop):
        trial.gather(ROWS)
        trial.begin(ROWS)
    trial.close()
    with pytest.raises(UsageError, match="closed"):
        trial.gather(ROWS)


@pytest.mark.parametrize(
    ("seconds", "path"),
    [
        ({"cuda-copy-engine": [0.4, 0.4, 9.0], "cuda-kernel": [0.5, 0.5, 0.5]}, "cuda-copy-engine"),
        ({"cuda-copy-engine": [0.3, 0.6, 0.6], "cuda-kernel": [0.5, 0.5, 0.5]}, "cuda-kernel"),  # once, by luck
        ({"cuda-copy-engine": [0.502], "cuda-kernel": [0.5]}, "cuda-copy-engine"),
        ({"cuda-copy-engine": [0.6], "cuda-kernel": [0.5]}, "cuda-kernel"),
        ({"cuda-copy-engine": [0.6], "cuda-registered": [0.5]}, "cuda-registered"),
    ],
)
def test_the_path_with_the_shorter_steps_is_chosen(seconds: dict[str, list[float]], path: str) -> None:
    chosen = choose_faster_cuda_path.choose(seconds)
    assert chosen.path == path and "ms per batch" in chosen.why


def test_a_driver_without_batched_copies_gathers_with_the_kernel(stored: Stored) -> None:
    gatherer = stored.open(FakeDriver("copy_batch"), shuffle=True)
    assert gatherer.path == "cuda-kernel" and "cuMemcpyBatchAsync" in gatherer.why
    gatherer.close()


@pytest.mark.parametrize(("refuse", "why"), [("kernel", "libnvrtc"), ("compile", "--gpu-architecture")])
def test_without_kernel_and_batched_copies_index_select_gathers(stored: Stored, refuse: str, why: str) -> None:
    gatherer = stored.open(FakeDriver("copy_batch", refuse), shuffle=True)
    assert gatherer.path == "cuda-registered" and "cuMemcpyBatchAsync" in gatherer.why and why in gatherer.why
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    gatherer.close()


@pytest.mark.parametrize("kept", ["cuda-copy-engine", "cuda-registered"])
@pytest.mark.parametrize("refuse", ["kernel", "compile"])
def test_memory_stays_registered_for_the_path_that_is_kept(
    stored: Stored, kept: str, refuse: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    driver = FakeDriver(refuse)
    costs = {"cuda-copy-engine": 2.0, "cuda-registered": 2.0, kept: 1.0}
    gatherer, paths = play(stored, driver, costs)  # each batch is compared with the columns
    assert set(paths[COMPARED + 2 :]) == {kept} and len(driver.registered) == 3
    gatherer.close()
    stored.columns.clear()
    gc.collect()
    assert not driver.registered


def test_the_path_that_is_not_kept_is_closed_though_it_was_two_batches_ahead(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(choose_faster_cuda_path, "_chosen", {})
    closed: list[str] = []
    close = CudaGatherer.close

    def noted(gatherer: CudaGatherer) -> None:
        closed.append(gatherer.path)
        close(gatherer)

    monkeypatch.setattr(CudaGatherer, "close", noted)
    driver = FakeDriver()
    trial = stored.open(driver, shuffle=True)
    upcoming = iter(np.random.default_rng(2).integers(0, 50, (COMPARED + 40, 5)))
    begun: deque[Any] = deque()
    while (rows := begun.popleft() if begun else next(upcoming, None)) is not None:
        driver.gpu_clock += {"cuda-copy-engine": 2.0, "cuda-kernel": 1.0}[trial.path]
        same(trial.gather(rows), stored.columns, rows)
        while len(begun) < trial.ahead and (following := next(upcoming, None)) is not None:
            trial.begin(following)
            begun.append(following)
    assert trial.path == "cuda-kernel" and closed == ["cuda-copy-engine"]
    trial.close()


@pytest.mark.parametrize(
    ("path", "refuse"), [("cuda-copy-engine", "copy_batch"), ("cuda-kernel", "kernel"), ("cuda-kernel", "register")]
)
def test_a_path_that_cannot_be_used_is_refused_with_the_reason(stored: Stored, path: str, refuse: str) -> None:
    with pytest.raises(UsageError, match=f"path='{path}' cannot be used") as caught:
        stored.open(FakeDriver(refuse), path=path)
    assert caught.value.why


def test_resident(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, DISK, resident=True)
    assert gatherer.path == "cuda-resident" and not driver.registered
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    assert driver.sent == ["consumer"]
    gatherer.close()
    gatherer.close()
    with pytest.raises(UsageError, match="closed"):
        gatherer.gather(ROWS)


@pytest.mark.parametrize("refuse", [(), ("kernel",)])
def test_resident_batches_are_gathered_by_the_kernel_once_it_is_compiled(
    stored: Stored, refuse: tuple[str, ...]
) -> None:
    driver = FakeDriver(*refuse)
    gatherer = stored.open(driver, DISK, resident=True)
    order = permutation(50, 1, 2)
    for first in range(0, 50, 4):
        same(gatherer.gather(order[first : first + 4]), stored.columns, order[first : first + 4])
        used = ("kernel", "consumer") in driver.log
        assert used == (not refuse and first >= 4 * (cuda_resident._COMPILE_AT - 1))
    same(gatherer.gather(ROWS), stored.columns, ROWS)  # no part of an order
    gatherer.close()


def test_resident_data_in_the_cache_are_shared_with_other_processes(
    stored: Stored, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(list_gpu_copies, "PATIENCE_S", 60.0)  # a busy machine is not a stopped process
    entry = SimpleNamespace(backing="shm", key="k1", store=os.fspath(tmp_path), names=("train.h5",))
    driver = FakeDriver()
    first = stored.open(driver, entry, resident=True)
    assert "copied here for all processes" in first.why
    same(first.gather(ROWS), stored.columns, ROWS)
    assert len(driver.shared_memory.maps) == 3
    with forked_holder(stored, entry):  # another process gets it
        same(first.gather(ROWS), stored.columns, ROWS)
    first.close()
    stored.columns.clear()
    gc.collect()
    assert not driver.shared_memory.maps and not driver.shared_memory.handles


@contextmanager
def forked_holder(stored: Stored, entry: Any) -> Iterator[None]:
    """Another process that has the columns in GPU memory."""
    ready, hold = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        try:
            columns = {name: np.array(column) for name, column in stored.columns.items()}
            settings = BatchSettings(5, device="cuda", resident=True)
            kept = open_gatherer(columns, entry, settings, files={}, driver=FakeDriver())  # type: ignore[arg-type]
            os.write(ready[1], b"shared" if "shared" in kept.why else b"own")
            os.close(hold[1])
            os.read(hold[0], 1)
        finally:
            os._exit(0)
    os.close(hold[0])
    try:
        assert os.read(ready[0], 10) == b"shared"
        yield
    finally:
        os.close(hold[1])
        os.waitpid(child, 0)
        os.close(ready[0])
        os.close(ready[1])


def test_the_order_is_sent_to_the_gpu_once_per_epoch(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, resident=True)
    for seed in range(2):
        order = permutation(len(stored.columns["heat"]), seed, 0)
        for first in range(0, len(order), 7):
            rows = order[first : first + 7]
            same(gatherer.gather(rows), stored.columns, rows)
    assert driver.sent == ["consumer"] * 2
    gatherer.close()


def test_other_streams_wait_for_the_order_and_keep_its_memory(stored: Stored) -> None:
    """It was sent on one stream: another one could read it too early, or after its memory is used for something else."""
    driver = FakeDriver()
    gatherer = stored.open(driver, resident=True)
    order = permutation(len(stored.columns["heat"]), 0, 0)
    gatherer.gather(order[:7])
    driver.log.clear()
    with driver.on(FakeStream(driver.log, "another")):
        for first in (7, 14):
            rows = order[first : first + 7]
            same(gatherer.gather(rows), stored.columns, rows)
    assert driver.log.count(("another", "waits for", "consumer")) == 1
    assert [(len(tensor), stream) for tensor, stream in driver.lent] == [(len(order), "another")]
    gatherer.close()


@pytest.mark.parametrize("options", [{"resident": True}, {"path": "cuda-kernel"}, {"path": "cuda-registered"}])
def test_an_order_that_changes_in_place_is_sent_again(stored: Stored, options: dict[str, Any]) -> None:
    gatherer = stored.open(FakeDriver(), **options)
    order = np.arange(50)
    several = np.arange(100).reshape(10, 10) % 50
    for _ in range(3):
        np.random.default_rng(3).shuffle(order)
        for rows in (order[5:12], order[::7], several[3], several[:, 2]):
            same(gatherer.gather(rows), stored.columns, rows)
    gatherer.close()


def test_columns_in_gpu_memory_are_not_counted_again(stored: Stored) -> None:
    needed = sum(column.nbytes for column in stored.columns.values()) + (2 << 20)
    driver = FakeDriver(free=needed + (8 << 30), total=80 << 30)
    first = stored.open(driver, resident=True)
    driver.room = needed - stored.columns["heat"].nbytes + (8 << 30), 80 << 30
    second = stored.open(driver, resident=True)
    assert second.path == first.path == "cuda-resident"
    first.close()
    second.close()


def test_arrays_larger_than_gpu_memory_are_refused_with_sizes(stored: Stored) -> None:
    driver = FakeDriver(free=1 << 30, total=80 << 30)
    with pytest.raises(NoRoom, match=r"1 GB of 80 GB free, of which 8 GB stay reserved"):
        stored.open(driver, resident=True)


def test_an_entry_on_disk_is_not_registered(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, DISK)
    assert gatherer.path == "cuda-pinned" and "on disk" in gatherer.why and not driver.registered
    for _ in range(5):
        same(gatherer.gather(ROWS), stored.columns, ROWS)
    same(gatherer.gather(ROWS[:0]), stored.columns, ROWS[:0])
    gatherer.close()


@pytest.mark.parametrize(
    ("refuse", "path", "why"),
    [
        (("register",), "cuda-pinned", "did not register the shared copy: operation not permitted"),
        (("window", "copy_batch"), "cuda-pinned", "does not see registered memory in place"),
        (("register", "pinned"), "cuda-copy", "page-locked: out of memory"),
    ],
)
def test_fallback_where_cuda_refuses(stored: Stored, refuse: tuple[str, ...], path: str, why: str) -> None:
    driver = FakeDriver(*refuse)
    gatherer = stored.open(driver)
    assert gatherer.path == path and why in gatherer.why
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    gatherer.close()
    stored.columns.clear()
    gc.collect()
    assert not driver.registered


def test_other_reasons_not_to_register(stored: Stored) -> None:
    for files, word in ((dict(stored.files), "shorter"), ({}, "not a contiguous array")):
        if files:
            files["heat"] = files["heat"][0], 1 << 30
        gatherer = open_gatherer(stored.columns, SHM, BatchSettings(5, device="cuda"), files=files, driver=FakeDriver())  # type: ignore[arg-type]
        assert gatherer.path == "cuda-pinned" and word in gatherer.why
        gatherer.close()
    gatherer = stored.open(FakeDriver(), SimpleNamespace(backing="inplace"))
    assert gatherer.path == "cuda-pinned" and "inplace" in gatherer.why
    gatherer.close()


def test_a_file_that_is_gone_or_another_users(stored: Stored, tmp_path: Path) -> None:
    path, offset = stored.files["heat"]
    stored.files["heat"] = tmp_path / "gone.npy", offset
    driver = FakeDriver()
    gatherer = stored.open(driver)
    assert gatherer.path == "cuda-pinned" and "gone.npy" in gatherer.why
    gatherer.close()
    if os.geteuid() == 0:
        os.chown(path, 1, 1)
        stored.files["heat"] = path, offset
        gatherer = stored.open(driver)
        assert gatherer.path == "cuda-pinned" and "not a regular file of this user" in gatherer.why
        gatherer.close()


def test_columns_in_pieces(tmp_path: Path) -> None:
    """A column with gaps between its rows, and batches large enough for the helpers."""
    wide = np.arange(40 * 500_000, dtype=np.int32).reshape(40, 500_000)
    columns = {"wide": wide, "every": wide[:, ::2], "label": np.arange(40)}
    gatherer = open_gatherer(columns, DISK, BatchSettings(5, device="cuda"), files={}, driver=FakeDriver())  # type: ignore[arg-type]
    for rows in (np.arange(0, 40, 3), np.array([5, 5, 39, 0])):
        same(gatherer.gather(rows), columns, rows)
    gatherer.close()


@pytest.mark.parametrize(("stride", "path"), [(7, "cuda-pinned"), (2, "cuda-pinned"), (8, "cuda-")])
def test_windows_of_tokens(tmp_path: Path, stride: int, path: str) -> None:
    """Rows that overlap are gathered by the CPU; those that lie side by side may take any path."""
    stored = Stored(tmp_path, tokens=np.arange(1000, dtype=np.uint16))
    stored.columns["tokens"] = np.lib.stride_tricks.sliding_window_view(stored.columns["tokens"], 8)[::stride]
    gatherer = stored.open(FakeDriver(), shuffle=True)
    assert gatherer.path.startswith(path)
    for rows in (np.arange(0, 100, 3), np.array([5, 5, 99, 0])):
        same(gatherer.gather(rows), stored.columns, rows)
    gatherer.close()


# The order of events.


def test_a_batch_is_handed_to_the_consumers_stream(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver)
    driver.log.clear()
    gatherer.gather(ROWS)
    # The memory is the consumer's, and may have been used until now.
    assert driver.log == [
        ("mark", "consumer"), ("side", "waits for", "consumer"), ("mark", "side"), ("consumer", "waits for", "side"),
    ]  # fmt: skip
    assert driver.lent == []
    gatherer.close()


@pytest.mark.parametrize("entry", [SHM, DISK])
def test_a_batch_begun_on_one_stream_and_used_on_another(stored: Stored, entry: Any) -> None:
    """Its memory belongs to the first, and must not be reused there while the second reads it."""
    driver = FakeDriver()
    gatherer = stored.open(driver, entry)
    gatherer.begin(ROWS)
    with driver.on(FakeStream(driver.log, "another")):
        batch = gatherer.gather(ROWS)
    assert ("another", "waits for", "side") in driver.log
    assert {id(tensor) for tensor, stream in driver.lent if stream == "another"} == {id(t) for t in batch.values()}
    gatherer.close()


@pytest.mark.parametrize("how", ["cuda-kernel", "cuda-registered", "cuda-copy-engine", "cuda-pinned"])
def test_a_batch_that_is_never_used_keeps_its_memory_until_the_side_stream_is_done(stored: Stored, how: str) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, path=how, shuffle=True)
    for left in ("another batch is asked for", "close"):
        driver.lent.clear()
        gatherer.begin(ROWS)
        if left == "close":
            gatherer.close()
        else:
            same(gatherer.gather(np.array([4])), stored.columns, np.array([4]))
            for _ in range(gatherer.ahead):
                gatherer.begin(np.array([4]))  # the first one is of a loop that was left
        gc.collect()
        assert len([name for _, name in driver.lent if name == "side"]) >= len(stored.columns), left


def test_an_exception_while_a_batch_is_queued_keeps_its_memory(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, path="cuda-copy-engine")
    monkeypatch.setattr(driver, "copy_batch", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        gatherer.gather(ROWS)
    gc.collect()
    assert {name for _, name in driver.lent} == {"side"} and len(driver.lent) == len(stored.columns)
    gatherer.close()


@pytest.mark.parametrize("entry", [SHM, DISK])
def test_the_next_batch_is_begun_and_not_waited_for(stored: Stored, entry: Any) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, entry)
    following = ROWS[::-1].copy()
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    driver.log.clear()
    gatherer.begin(following)
    assert ("consumer", "waits for", "side") not in driver.log  # or the step in between would wait too
    same(gatherer.gather(following), stored.columns, following)
    assert driver.log.count(("mark", "side")) == 1  # made once
    assert driver.log.count(("consumer", "waits for", "side")) == 1
    gatherer.close()


@pytest.mark.parametrize("entry", [SHM, DISK])
def test_a_prefetched_batch_that_is_not_used(stored: Stored, entry: Any) -> None:
    gatherer = stored.open(FakeDriver(), entry)
    for _ in range(4):
        gatherer.begin(np.array([1, 2, 3]))
        gatherer.begin(np.array([4]))
        same(gatherer.gather(ROWS), stored.columns, ROWS)
    gatherer.begin(ROWS)
    gatherer.close()


def test_a_buffer_is_filled_again_after_its_copy(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver, DISK)
    assert driver.pinned_sizes == [4096, 4096, 4096]
    driver.log.clear()
    for _ in range(4):
        gatherer.gather(ROWS)
    # Three buffers in turn: the fourth batch waits for the first one's copy before anything is written.
    first = driver.log.index(("wait for", "side"))
    assert driver.log[:first].count(("mark", "side")) == 3
    gatherer.gather(np.arange(50))
    assert driver.pinned_sizes[-1] == 16384  # 50 × (105 + 64 + 8) bytes, and a power of two
    gatherer.close()


@pytest.mark.parametrize("cpus", [2, 16])
def test_batches_are_made_side_by_side_where_there_are_cpus(
    stored: Stored, cpus: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_pinned, "usable_cpus", lambda: cpus)
    driver, before = FakeDriver(), set(threading.enumerate())
    gatherer = stored.open(driver, DISK)
    assert gatherer.ahead == (6 if cpus == 16 else 2) and len(driver.pinned_sizes) == (6 if cpus == 16 else 3)
    orders = list(np.random.default_rng(4).integers(0, 50, (40, 5)))
    for number, rows in enumerate(orders):
        if number % 10 == 0:  # a loop begins, and the one before was left
            for following in orders[number : number + gatherer.ahead]:
                gatherer.begin(following)
        same(gatherer.gather(rows), stored.columns, rows)
        if number + gatherer.ahead < len(orders):
            gatherer.begin(orders[number + gatherer.ahead])
    gatherer.close()
    assert not set(threading.enumerate()) - before


def test_large_batches_are_made_one_by_one() -> None:
    assert cuda_pinned._makers(300 << 20) == 1
    assert cuda_pinned._makers(0) >= 1


def test_no_more_page_locked_memory_in_the_middle(stored: Stored) -> None:
    driver = FakeDriver("pinned 16384")
    gatherer = stored.open(driver, DISK)
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    assert gatherer.path == "cuda-pinned"
    rows = np.arange(50)
    for _ in range(3):
        same(gatherer.gather(rows), stored.columns, rows)
    assert gatherer.path == "cuda-copy" and "on disk" in gatherer.why and "page-locked" in gatherer.why
    gatherer.close()


def test_an_error_in_the_thread_is_raised_by_gather(stored: Stored, monkeypatch: pytest.MonkeyPatch) -> None:
    gatherer = stored.open(FakeDriver(), DISK)
    for module in (cpu_gather, cuda_pinned):
        monkeypatch.setattr(module, "take_rows", lambda *_: 1 / 0)
    gatherer.begin(ROWS)
    with pytest.raises(ZeroDivisionError):
        gatherer.gather(ROWS)
    monkeypatch.undo()
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    gatherer.close()


def test_a_batch_begun_without_gradients_can_be_trained_on(stored: Stored) -> None:
    gatherer = stored.open(FakeDriver())
    with torch.inference_mode():
        gatherer.begin(ROWS)
    heat = gatherer.gather(ROWS)["heat"]
    assert not heat.is_inference()
    weight = torch.ones((), requires_grad=True)
    (heat * weight).sum().backward()
    assert weight.grad is not None
    gatherer.close()


# Lifetimes.


def test_a_map_is_registered_once_and_until_the_arrays_are_gone(stored: Stored) -> None:
    driver = FakeDriver()
    first, second = stored.open(driver), stored.open(driver)
    assert len(driver.registered) == 3
    first.close()
    same(second.gather(ROWS), stored.columns, ROWS)
    second.close()
    second.close()
    assert len(driver.registered) == 3  # the next epoch finds it so
    third = stored.open(driver)
    assert len(driver.registered) == 3
    stored.columns.clear()
    gc.collect()
    assert len(driver.registered) == 3
    driver.log.clear()
    third.close()
    assert not driver.registered and ("synchronize", "side") in driver.log


def test_registered_again_after_release(stored: Stored) -> None:
    driver = FakeDriver()
    for _ in range(3):
        columns = {name: np.load(path, mmap_mode="c") for name, (path, _) in stored.files.items() if name != "nothing"}
        gatherer = open_gatherer(columns, SHM, BatchSettings(5, device="cuda"), files=stored.files, driver=driver)  # type: ignore[arg-type]
        assert gatherer.path == "cuda-copy-engine" and len(driver.registered) == 3
        same(gatherer.gather(ROWS), columns, ROWS)
        del gatherer, columns  # closed by nobody
        gc.collect()
        assert not driver.registered


def test_files_are_unmapped_when_unregistered(stored: Stored) -> None:
    path = os.fspath(stored.files["heat"][0])

    def shared() -> int:
        return sum(path in line and "r--s" in line for line in Path("/proc/self/maps").read_text().splitlines())

    driver = FakeDriver()
    gatherer = stored.open(driver)
    assert shared() == 1
    gatherer.close()
    stored.columns.clear()
    gc.collect()
    assert shared() == 0
    again = Stored(path_of(stored), heat=np.ones((4, 2)))
    gatherer = again.open(FakeDriver("unregister"))
    gatherer.close()
    again.columns.clear()
    gc.collect()
    assert "r--s" in Path("/proc/self/maps").read_text()  # CUDA still has it: it stays


def path_of(stored: Stored) -> Path:
    folder = stored.files["heat"][0].parent / "again"
    folder.mkdir()
    return folder


def test_batches_outlive_the_gatherer(stored: Stored) -> None:
    for entry in (SHM, DISK):
        gatherer = stored.open(FakeDriver(), entry)
        batch = gatherer.gather(ROWS)
        gatherer.close()
        del gatherer
        same(batch, stored.columns, ROWS)


def test_a_closed_gatherer_refuses(stored: Stored) -> None:
    gatherer = stored.open(FakeDriver())
    gatherer.close()
    for use in (gatherer.gather, gatherer.begin):
        with pytest.raises(UsageError, match="closed"):
            use(ROWS)


@pytest.mark.filterwarnings("ignore:This process .* is multi-threaded")
def test_a_forked_child_is_refused_and_releases_nothing(stored: Stored) -> None:
    driver = FakeDriver()
    gatherer = stored.open(driver)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            gatherer.gather(ROWS)
        except UsageError as problem:
            gatherer.close()
            stored.columns.clear()
            del gatherer
            gc.collect()
            os.write(write, f"{len(driver.registered)} {problem}".encode())
        os._exit(0)
    os.close(write)
    said = os.read(read, 4096).decode()
    os.close(read)
    os.waitpid(child, 0)
    assert said.startswith("3 this process cannot use CUDA") and "spawn" in said
    same(gatherer.gather(ROWS), stored.columns, ROWS)
    gatherer.close()


def test_threads_end_with_the_gatherer(stored: Stored) -> None:
    before = set(threading.enumerate())
    gatherer = stored.open(FakeDriver(), DISK)
    assert set(threading.enumerate()) - before
    gatherer.begin(ROWS)
    gatherer.gather(ROWS)
    gatherer.close()
    assert not set(threading.enumerate()) - before  # those of other tests may end meanwhile


class Array:
    """Something that can be referred to weakly."""


def test_resources_live_while_used_or_their_arrays_exist() -> None:
    keep, made, dropped = ResourceCache(), [], []

    def make() -> str:
        made.append(1)
        return "thing"

    one, other = Array(), Array()
    first = keep.use("key", one, make, dropped.append)
    second = keep.use("key", other, make, dropped.append)
    assert first.resource == second.resource == "thing" and len(made) == 1
    first.release()
    first.release()
    del one, other
    assert not dropped
    second.release()
    assert dropped == ["thing"] and len(keep) == 0
    with pytest.raises(CudaRefused):
        keep.use("key", Array(), refuse, dropped.append)
    assert len(keep) == 0


def refuse() -> None:
    raise CudaRefused("no")


# The driver, as far as it works without a GPU.


def test_errors_where_cuda_is_missing() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is CUDA here")
    with pytest.raises(UsageError, match="CUDA is not available"):
        open_driver("cuda")
    with pytest.raises(UsageError, match="not a CUDA device"):
        open_driver("cpu")
    with pytest.raises(UsageError, match="is not a device"):
        open_driver("graphics")


class Answer(int):
    """An error code as pybind gives it: a number, and more than that."""


class FakeTorch:
    """As much of torch as the driver asks for registering."""

    def __init__(self, *answers: int) -> None:
        self.answers = list(answers)
        self.asked: list[Any] = []
        self.cuda = SimpleNamespace(device=lambda device: self, cudart=lambda: self)

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...

    def cudaHostRegister(self, address: int, length: int, flags: int) -> Answer:  # noqa: N802
        self.asked.append(flags)
        return Answer(self.answers.pop(0))

    def cudaHostUnregister(self, address: int) -> Answer:  # noqa: N802
        return Answer(self.answers.pop(0))

    def cudaGetErrorString(self, answer: Answer) -> str:  # noqa: N802
        assert isinstance(answer, Answer)
        return "invalid argument"

    def ones(self, *_: object, **__: object) -> Any:
        self.asked.append("kernel")
        raise RuntimeError("CUDA error: invalid argument")


def driver_on(fake: FakeTorch) -> Driver:
    driver = Driver(torch.device("cuda", 0))
    driver._torch = fake
    return driver


def test_registering_tries_the_flags_and_leaves_no_error_behind() -> None:
    fake = FakeTorch(0)
    driver_on(fake).register(4096, 4096)
    assert fake.asked == [11]
    fake = FakeTorch(1, 0)
    driver_on(fake).register(4096, 4096)
    assert fake.asked == [11, "kernel", 8]
    fake = FakeTorch(1, 801)
    with pytest.raises(CudaRefused, match=r"invalid argument \(801\)"):
        driver_on(fake).register(4096, 4096)
    assert fake.asked == [11, "kernel", 8, "kernel"]
    with pytest.raises(CudaRefused):
        driver_on(FakeTorch(1)).unregister(4096)
    driver_on(FakeTorch(0)).unregister(4096)


class Elsewhere(FakeTorch):
    """A torch that copies what it should see in place."""

    def as_tensor(self, window: Any, device: Any) -> Any:
        interface = window.__cuda_array_interface__
        self.asked.append(interface["shape"])
        assert interface["data"][1] is False and np.dtype(interface["typestr"]).itemsize == 8
        return SimpleNamespace(data_ptr=lambda: 1, device=device)


def test_a_copy_instead_of_a_view_is_noticed_at_one_integer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_calls_for_gather, "_device_address", lambda address: address)
    fake = Elsewhere()
    with pytest.raises(CudaRefused, match="in place"):
        driver_on(fake).window(4096, 1 << 40, 8)
    assert fake.asked == [(1,)]
