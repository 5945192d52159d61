"""Rows copied by several threads: always the right rows, and the fastest number of threads stays."""

from __future__ import annotations

import _thread
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from legroom.loader.batches import cpu_gather
from legroom.loader.batches.cpu_gather import RowCopier

NDArray = np.ndarray[Any, Any]
ROW = 1 << 18


@pytest.fixture(autouse=True)
def _no_trials_yet() -> Iterator[None]:
    cpu_gather._trials.cache_clear()
    yield
    cpu_gather._trials.cache_clear()


@pytest.fixture
def source() -> NDArray:
    return np.random.default_rng(0).integers(0, 256, (16, ROW), dtype=np.uint8)


def copied(copier: RowCopier, source: NDArray, rows: NDArray, **how: bool) -> bool:
    out = np.zeros((len(rows), ROW), np.uint8)
    copier.copy(rows, out, **how)
    return bool((out == source[rows]).all())


@pytest.mark.parametrize("cpus", [1, 2, 3, 4, 64])
def test_rows_are_right_with_any_number_of_threads(cpus: int, source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "usable_cpus", lambda: cpus)
    copier, draw = RowCopier(source), np.random.default_rng(1)
    for count in [16, *range(1, 17), *[16] * 12]:
        assert copied(copier, source, draw.integers(0, 16, count))


@pytest.mark.parametrize("best", [1, 2, 4])
def test_the_fastest_number_of_threads_stays_for_copies_of_that_size(
    best: int, source: NDArray, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[int] = []
    now = [0.0]

    def fake(_source: NDArray, _rows: NDArray, _out: NDArray, count: int) -> None:
        seen.append(count)
        now[0] += 1.0 if count == best else 2.0

    monkeypatch.setattr(cpu_gather, "usable_cpus", lambda: 4)
    monkeypatch.setattr(cpu_gather, "_copy_rows", fake)
    monkeypatch.setattr(cpu_gather, "_clock", lambda: now[0])
    out = np.empty((16, ROW), np.uint8)
    for _ in range(10):  # as many loops over the data
        copier = RowCopier(source)
        copier.copy(np.arange(16), out)
        copier.copy(np.arange(16), out)
    assert sorted(seen[:9]) == [1, 1, 1, 2, 2, 2, 4, 4, 4]
    assert seen[9:] == [best] * 11


def test_one_thread_for_background_copies_and_small_batches(source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise AssertionError("this copy was divided")

    monkeypatch.setattr(cpu_gather, "_copy_rows", fail)
    assert copied(RowCopier(source), source, np.arange(16), one_core=True)
    assert copied(RowCopier(source), source, np.arange(2))


def test_copies_where_no_thread_can_be_started(source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: object) -> int:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(_thread, "start_new_thread", none_left)
    monkeypatch.setattr(cpu_gather, "usable_cpus", lambda: 4)
    assert copied(RowCopier(source), source, np.arange(16))


def test_an_error_in_a_thread_is_raised(source: NDArray, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_gather, "usable_cpus", lambda: 4)
    with pytest.raises((ValueError, TypeError, IndexError)):
        RowCopier(source).copy(np.arange(16), np.empty((16, ROW + 1), np.uint8))


LIMITED = """
import _thread, itertools, os, resource, sys
import numpy as np
from legroom.loader.batches import cpu_gather
from legroom.loader.batches.batch_iterator import Prefetcher
from legroom.system.processes_and_threads import start_daemon_thread
class Rows:
    def gather(self, rows): return {"rows": source[rows]}
    gather_on_one_core = gather
source, rows = np.ones((16, 1 << 18), np.uint8), np.arange(16)
cpu_gather.usable_cpus = lambda: 4
started = []
class Counted:
    def __getattr__(self, name): return getattr(_thread, name)
    def start_new_thread(self, *given): started.append(given); return _thread.start_new_thread(*given)
from legroom.system import processes_and_threads
processes_and_threads._thread = Counted()
import legroom.loader.batches.batch_iterator as prefetch
prefetch.prefetch_pays = lambda *seconds: True
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (60 << 20),) * 2)
copier, out = cpu_gather.RowCopier(source), np.zeros((16, 1 << 18), np.uint8)
for _ in range(12):
    out[:] = 0
    copier.copy(rows, out)
    assert (out == source).all()
ahead = Prefetcher(Rows(), clock=itertools.count().__next__)  # every step takes a second
for _ in range(20):
    ahead.begin(rows)
    assert (ahead.gather(rows)["rows"] == source).all()
print(len(started), start_daemon_thread(lambda: None, "test"))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="needs /proc")
def test_where_ulimit_leaves_no_room_for_a_thread_none_is_started() -> None:
    """CPython waits forever for a thread that runs out of memory before it has begun."""
    ran = subprocess.run([sys.executable, "-c", LIMITED], capture_output=True, text=True, timeout=240)
    assert ran.stdout.split() == ["0", "None"], ran
