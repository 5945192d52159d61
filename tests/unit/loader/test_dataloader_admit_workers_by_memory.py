"""Admission of workers where memory is low: which workers wait, what is measured, what is refused."""

from __future__ import annotations

import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from recorded_admissions import record_admissions

from legroom.advice.memory_need import Each
from legroom.errors import BudgetTooSmall, LoaderClosed
from legroom.loader.dataloader import admit_workers_by_memory, memory_slots, worker_shutdown
from legroom.loader.dataloader.admit_workers_by_memory import Admission, admission_for
from legroom.loader.dataloader.collate import to_send
from legroom.loader.dataloader.memory_slots import SlotPool
from legroom.loader.dataloader.send import SlotWriter, stacked_bytes
from legroom.loader.measure_process_memory import BareProcess, FreeMemory

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork"),
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]
MB = 1 << 20
EACH = Each(10 * MB, 24 * MB, 24 * MB)


class NoMonitor:
    def __init__(self, *_: object) -> None: ...

    def pause(self) -> None: ...

    def resume(self) -> None: ...


@pytest.fixture(autouse=True)
def _not_a_worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(admit_workers_by_memory, "_limit_own_memory", lambda: None)  # not in the process of the tests
    monkeypatch.setattr(admit_workers_by_memory, "GrowthMonitor", NoMonitor)  # which would end it
    yield
    admit_workers_by_memory._current = None


@pytest.fixture
def earlier(monkeypatch: pytest.MonkeyPatch) -> set[int | None]:
    """The child processes that other tests have left; those of this one are waited for longer than 5 s by torch."""
    monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 60.0)
    return children()


def children() -> set[int | None]:
    return {one.pid for one in multiprocessing.active_children()}


def have(monkeypatch: pytest.MonkeyPatch, free: int) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(free, "here"))


def test_no_admission_with_plenty_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 4 << 30)
    assert admission_for(4, "fork", None, None, 4, iterable=False) is None
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: None)  # unknown
    assert admission_for(4, "fork", None, None, 4, iterable=False) is None


def test_workers_known_not_to_fit_are_refused_before_they_start(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 200 * MB)
    with pytest.raises(BudgetTooSmall, match="4 workers with one batch each") as caught:
        admission_for(4, "fork", None, EACH, 8, iterable=False)
    assert "256 MB" in caught.value.why and "200 MB are free (here)" in caught.value.why
    assert caught.value.fix[0] == "num_workers=2 fits" and caught.value.fix[1].startswith("batch_size=")


def test_workers_known_to_fit_do_not_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 300 * MB)
    admitted = admission_for(4, "fork", None, EACH, 8, iterable=False)
    assert admitted is not None and not admitted.waiting and admitted.measured == EACH
    admitted(3)


def test_spawned_workers_that_alone_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 500 * MB)
    monkeypatch.setattr(admit_workers_by_memory, "bare_process", lambda: BareProcess(process=150 * MB, forked=10 * MB))
    with pytest.raises(BudgetTooSmall, match="not enough free memory for 4 workers") as caught:
        admission_for(4, "spawn", None, None, 8, iterable=False)
    assert "before it loads a sample" in caught.value.why
    assert caught.value.fix[0] == "use num_workers=2 or less"


def test_workers_wait_until_the_first_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, 900 * MB)
    monkeypatch.setattr(
        admit_workers_by_memory, "_above_current", lambda: 0
    )  # the peak of earlier tests in this process
    called: list[int] = []
    admitted = Admission(2, called.append, None, iterable=False)
    other = threading.Thread(target=admitted, args=(1,))
    other.start()
    admitted(0)
    admitted.samples_loaded()
    assert called == [0] and admitted.waiting
    admitted.decide(24 * MB, 4)
    other.join(60)
    assert called == [0, 1] and not admitted.waiting
    assert admitted.measured is not None and admitted.measured.batch == 24 * MB and admitted.measured.own > 0


def test_the_first_worker_refuses_all(monkeypatch: pytest.MonkeyPatch) -> None:
    have(monkeypatch, MB)
    monkeypatch.setattr(admit_workers_by_memory, "_ALL_READY_S", 0.0)
    admitted = Admission(2, None, None, iterable=False)
    admitted(0)
    with pytest.raises(BudgetTooSmall):
        admitted.decide(24 * MB, 4)
    again = admitted.error()
    assert again is not None and "2 workers" in again.what
    with pytest.raises(LoaderClosed):
        admitted(1)


def test_no_worker_waits_after_the_epoch_is_over() -> None:
    closed = Admission(2, None, None, iterable=False)
    closed.close()
    with pytest.raises(LoaderClosed):
        closed(1)
    admitted = Admission(2, None, None, iterable=False)
    admitted.admit()
    admitted(1)


def test_workers_of_an_iterable_dataset_wait_only_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "_FIRST_BATCH_S", {True: 0.05, False: 60})
    started = time.monotonic()
    Admission(2, None, None, iterable=True)(1)
    assert time.monotonic() - started >= 0.05


def test_a_first_worker_that_has_ended_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    admitted = Admission(2, None, None, iterable=False)
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    monkeypatch.setattr(os, "getpid", lambda: child.pid)
    monkeypatch.setattr(admit_workers_by_memory, "_ALL_READY_S", 0.0)
    admitted(0)
    monkeypatch.undo()
    monkeypatch.setattr(admit_workers_by_memory, "_limit_own_memory", lambda: None)
    admitted(1)
    assert not admitted.waiting


def test_a_loader_with_little_memory_measures_once(monkeypatch: pytest.MonkeyPatch) -> None:
    import legroom

    have(monkeypatch, 900 * MB)
    inits: list[Any] = []
    asked = record_admissions(monkeypatch)
    loader = legroom.DataLoader(
        torch.arange(64.0), 4, num_workers=2, worker_init_fn=inits.append, multiprocessing_context="fork"
    )
    for _ in range(2):
        assert torch.equal(torch.cat(list(loader)), torch.arange(64.0))
        assert loader.worker_init_fn == inits.append
    first, second = asked
    assert first.known is None and first.admission is not None
    assert second.known == first.admission.measured and second.known is not None and second.known.batch == 64
    assert loader.transport == "arena"


def test_a_loader_with_too_little_memory_raises_at_the_first_batch(
    monkeypatch: pytest.MonkeyPatch, earlier: set[int | None]
) -> None:
    import legroom

    have(monkeypatch, MB)
    monkeypatch.setattr(admit_workers_by_memory, "_check_processes", lambda *_: None)
    loader = legroom.DataLoader(torch.arange(64.0), 4, num_workers=2, multiprocessing_context="fork")
    batches = iter(loader)
    with pytest.raises(BudgetTooSmall, match="2 workers") as caught:
        next(batches)
    assert caught.value.why and caught.value.fix
    del batches, caught
    gc.collect()
    assert not children() - earlier


def test_the_expected_size_of_a_first_batch_is_no_smaller_than_the_batch() -> None:
    sample = {"a": torch.ones(3, 5), "b": [1, 2.0, torch.ones(7, dtype=torch.uint8)], "c": "text"}
    collated = torch.utils.data.default_collate([sample] * 6)
    assert sum(one.nbytes for one in [collated["a"], *collated["b"]]) <= 6 * stacked_bytes(sample)


def test_torchs_transport_is_not_used_if_memory_does_not_hold_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = SlotPool(None, 2)
    monkeypatch.setattr(pool, "take", lambda *_, **__: None)
    monkeypatch.setattr(memory_slots, "free_memory_now", lambda: FreeMemory(MB, "here"))
    with pytest.raises(BudgetTooSmall):
        to_send(torch.ones(10 * MB), SlotWriter(None), pool, None)


def test_forked_workers_that_alone_do_not_fit(monkeypatch: pytest.MonkeyPatch, earlier: set[int | None]) -> None:
    import legroom

    have(monkeypatch, MB)
    loader = legroom.DataLoader(torch.arange(8.0), 4, num_workers=2, multiprocessing_context="fork")
    with pytest.raises(BudgetTooSmall, match="not enough free memory for 2 workers") as caught:
        iter(loader)
    assert caught.value.fix[0] == "use num_workers=0: the training process makes the batches"
    assert not children() - earlier


def test_a_worker_is_stopped_by_exit_where_python_raises_nothing_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_shutdown, "_set_async_exc", None)
    assert not worker_shutdown.raise_in_thread(threading.get_ident(), MemoryError)
    ended: list[int] = []
    grown = iter([0, 0, 8 * MB])
    monkeypatch.setattr(worker_shutdown, "_resident", lambda: next(grown, 8 * MB))
    monkeypatch.setattr(worker_shutdown.os, "_exit", ended.append)
    worker_shutdown.GrowthMonitor(lambda: not ended, lambda _: worker_shutdown.Decision.STOP)
    deadline = time.monotonic() + 60
    while not ended and time.monotonic() < deadline:
        time.sleep(0.01)
    assert ended == [0]
