"""Threads that prepare batches: every row in its place, errors raised where they are waited for, no thread left."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import numpy as np
import pytest

from legroom.loader.batches import cpu_gather
from legroom.loader.batches.cpu_gather import RowThreads, TaskThread


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "usable_cpus", lambda: 8)
    monkeypatch.setattr(cpu_gather, "_LEAST_PART", 64)


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _threads_before() -> None:
    """Those of other tests in this process do not count."""
    _before.clear()
    _before.update(threading.enumerate())


def names() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread not in _before]


@pytest.mark.parametrize("count", [1, 2, 7, 8, 9, 500])
@pytest.mark.parametrize("shape", [(), (3,), (5, 7)])
def test_rows_are_copied_by_several_threads(eight: None, count: int, shape: tuple[int, ...]) -> None:
    random = np.random.default_rng(count)
    column = random.integers(-9, 9, (100, *shape), np.int32)
    rows = random.integers(0, 100, count)
    threads = RowThreads()
    assert len(names()) == 7
    for source in (column, np.asfortranarray(column)):
        into = np.zeros(column[:1].nbytes * count, np.uint8)
        threads.copy(source, rows, into)
        assert np.array_equal(into.view(np.int32).reshape(count, *shape), column[rows])
    threads.copy(column, rows[:0], np.empty(0, np.uint8))
    threads.stop()
    assert names() == []


def test_an_error_is_raised_after_all_threads_have_ended_their_part(
    eight: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = RowThreads()
    writing = threading.Event()
    first = threading.current_thread()
    ended: list[str] = []

    def take(column: Any, rows: Any, into: Any) -> None:
        if threading.current_thread() is first:
            writing.set()
            raise MemoryError
        assert writing.wait(60)
        ended.append(threading.current_thread().name)

    monkeypatch.setattr(cpu_gather, "take_rows", take)
    with pytest.raises(MemoryError):
        threads.copy(np.zeros((100, 8)), np.arange(100), np.empty(6400, np.uint8))
    assert len(ended) == 7
    threads.stop()


@pytest.mark.parametrize("copier", ["helpers", "threads"])
def test_an_error_of_a_helper_is_raised_after_the_others_have_ended(
    eight: None, monkeypatch: pytest.MonkeyPatch, copier: str
) -> None:
    raised = threading.Event()
    ended: list[int] = []

    def take(source: Any, rows: Any, *_: Any, **__: Any) -> None:
        if rows[0] == 0:
            return  # the waiting thread's
        if not any(row >= 25 for row in rows):  # the first of those that are waited for
            raised.set()
            raise MemoryError
        assert raised.wait(60)
        time.sleep(0.1)
        ended.append(int(rows[0]))

    column, rows = np.zeros((100, 8)), np.arange(100)
    with pytest.raises(MemoryError):
        if copier == "helpers":
            monkeypatch.setattr(cpu_gather, "take_rows", take)
            RowThreads().copy(column, rows, np.empty(6400, np.uint8))
        else:
            monkeypatch.setattr(np, "take", take)
            cpu_gather._copy_rows(column, rows, np.empty((100, 8)), 8)
    assert len(ended) == 6


def test_tasks_run_in_order_and_their_errors_are_raised_by_result() -> None:
    thread = TaskThread("legroom-test")
    done: list[int] = []
    tasks = [thread.start(lambda number=number: done.append(number)) for number in range(50)]  # type: ignore[misc]
    wrong = thread.start(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        wrong.result()
    assert [task.result() for task in tasks] == [None] * 50 and done == list(range(50))
    thread.stop()
    thread.stop()
    assert names() == []


def test_a_thread_ends_with_its_owner() -> None:
    thread = TaskThread("legroom-test")
    assert thread.start(lambda: 5).result() == 5 and names() == ["legroom-test"]
    del thread
    gc.collect()
    assert names() == []


def test_without_room_for_threads_everything_runs_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "start_daemon_thread", lambda *_: None)
    monkeypatch.setattr(cpu_gather, "room_for_threads", lambda *_: False)
    thread, threads = TaskThread("legroom-test"), RowThreads()
    assert thread.start(threading.current_thread).result() is threading.current_thread() and names() == []
    into = np.zeros(800_000, np.uint8)
    threads.copy(np.arange(100_000), np.arange(100_000)[::-1].copy(), into)
    assert into.view(np.int64)[0] == 99_999
    threads.stop()
    thread.stop()
