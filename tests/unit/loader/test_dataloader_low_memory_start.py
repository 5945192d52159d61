"""A careful start with real workers, however they are started: the admitted, a refusal, an empty share, a stopped draw."""

from __future__ import annotations

import gc
import multiprocessing
import sys
import time
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
from recorded_admissions import record_admissions

from legroom.errors import BudgetTooSmall
from legroom.loader.dataloader import admit_workers_by_memory
from legroom.loader.measure_process_memory import BareProcess, FreeMemory

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
MB = 1 << 20


@pytest.fixture(autouse=True)
def _low_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """So little memory that the first worker is measured."""
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 * MB, "here"))
    monkeypatch.setattr(admit_workers_by_memory, "bare_process", lambda: BareProcess(process=150 * MB, forked=10 * MB))


def in_worker(free: int, worker: int) -> None:
    """As ``worker_init_fn``: what is free in the worker's own process."""
    admit_workers_by_memory.free_memory_now = lambda: FreeMemory(free, "there")


class Share(torch.utils.data.IterableDataset):  # type: ignore[misc, name-defined]
    """The first worker has ``first`` samples, each other one eight."""

    def __init__(self, first: int) -> None:
        self.first = first

    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info().id
        yield from (torch.tensor([worker, row]) for row in range(8 if worker else self.first))


class Growing:
    """Every sample is 8 MB and takes 20 ms; one takes a minute, unless it is stopped: a thread that does so may be late."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> Any:
        for _ in range(3000 if index == 48 else 1):
            time.sleep(0.02)
        return torch.full((2 * MB,), float(index))


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_the_first_worker_is_measured_with_any_start_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record_admissions(monkeypatch)
    loader = legroom.DataLoader(torch.arange(64.0), 4, num_workers=2, multiprocessing_context=method)
    assert torch.equal(torch.cat(list(loader)), torch.arange(64.0))
    (admission,) = [one.admission for one in asked]
    assert admission is not None and not admission.waiting
    seen = admission.measured
    assert seen is not None and seen.batch == 64
    assert (seen.own > 60 * MB) == (method != "fork")  # those that are not forked have imported torch themselves
    assert loader.transport == "arena"


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_worker_refuses_with_any_start_method(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)  # then torch sends SIGTERM
    earlier = {one.pid for one in multiprocessing.active_children()}
    loader = legroom.DataLoader(
        torch.arange(64.0), 4, num_workers=2, multiprocessing_context=method,
        worker_init_fn=partial(in_worker, 17 * MB),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match="2 workers with one batch each") as caught:
        next(iter(loader))
    assert "while it makes a batch" in caught.value.why and caught.value.fix
    del caught
    gc.collect()
    assert not {one.pid for one in multiprocessing.active_children()} - earlier


@pytest.mark.parametrize(
    ("method", "first", "drop_last", "persistent"),
    [("fork", 0, False, False), ("fork", 0, False, True), ("fork", 1, True, False), ("spawn", 0, False, False)],
)
def test_an_empty_share_delays_no_worker(method: str, first: int, drop_last: bool, persistent: bool) -> None:
    loader = legroom.DataLoader(
        Share(first), 4, num_workers=2, drop_last=drop_last, multiprocessing_context=method,
        persistent_workers=persistent, worker_init_fn=partial(in_worker, 900 * MB),
    )  # fmt: skip
    loader_patience = admit_workers_by_memory._FIRST_BATCH_S
    patient = {True: 120.0, False: 120.0}
    admit_workers_by_memory._FIRST_BATCH_S = patient  # forked workers inherit it
    try:
        batches = list(loader)
    finally:
        admit_workers_by_memory._FIRST_BATCH_S = loader_patience
    assert [batch.tolist() for batch in batches] == [[[1, row] for row in range(start, start + 4)] for start in (0, 4)]


def test_a_share_shorter_than_a_batch_is_measured() -> None:
    loader = legroom.DataLoader(
        Share(2), 4, num_workers=2, multiprocessing_context="fork", worker_init_fn=partial(in_worker, 17 * MB)
    )
    with pytest.raises(BudgetTooSmall, match="2 workers with one batch each"):
        list(loader)


def test_loading_that_would_exhaust_memory_is_stopped() -> None:
    loader = legroom.DataLoader(
        Growing(), 64, num_workers=1, multiprocessing_context="fork",
        worker_init_fn=partial(in_worker, 24 * MB),
    )  # fmt: skip
    with pytest.raises(BudgetTooSmall, match="1 worker with the samples of one batch each") as caught:
        next(iter(loader))
    assert "when it was stopped" in caught.value.why and "24" not in caught.value.what
    assert caught.value.fix[0] == "use fewer workers or a smaller batch"
