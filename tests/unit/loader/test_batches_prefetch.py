"""Batches made ahead of time: when, and that nothing is left behind."""

from __future__ import annotations

import _thread
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest

from legroom.loader.batches import cpu_gather
from legroom.loader.batches.batch_iterator import Prefetcher, prefetch_pays
from legroom.system import processes_and_threads

NDArray = np.ndarray[Any, Any]


class Slow:
    """A gatherer that remembers who asked, and a clock by which it and its consumer take their time."""

    def __init__(self, seconds: float = 0.01, problem: Exception | None = None) -> None:
        self.seconds, self.problem, self.threads, self.now = seconds, problem, list[int](), 0.0
        self.asked = list[int]()
        self.go = threading.Event()
        self.go.set()

    def ahead(self) -> Prefetcher:
        return Prefetcher(self, clock=lambda: self.now)

    def take(self, seconds: float) -> None:
        self.now += seconds

    def gather(self, rows: NDArray) -> dict[str, Any]:
        self.threads.append(_thread.get_ident())
        self.asked.append(int(rows[0]))
        assert self.go.wait(60)
        self.take(self.seconds)
        if self.problem is not None and len(self.threads) > 6:
            raise self.problem
        return {"rows": rows.copy()}

    gather_on_one_core = gather


def run(ahead: Prefetcher, batches: int, consume: Callable[[], object] = lambda: None) -> list[int]:
    """A consumer's loop."""
    rows, found = np.array([0]), []
    for number in range(batches):
        batch = ahead.gather(rows)
        rows = np.array([number + 1])
        ahead.begin(rows)
        found.append(int(batch["rows"][0]))
        consume()
    return found


@pytest.mark.parametrize(
    ("gathering", "consuming", "answer"),
    [
        (1e-3, 0.0, False),  # nobody would work at the same time
        (1e-5, 1.0, False),  # nothing to gain
        (1e-3, 1e-2, True),
        (1e-3, 3e-4, False),
        (1e-3, 5e-4, True),
        (1.0, 0.1, False),
    ],
)
def test_when_prefetching_pays(gathering: float, consuming: float, answer: bool) -> None:
    assert prefetch_pays(gathering, consuming) is answer


def test_a_busy_consumer_gets_a_thread_and_an_idle_one_does_not() -> None:
    busy, idle = Slow(), Slow()
    assert run(busy.ahead(), 12, partial(busy.take, 0.02)) == list(range(12))
    assert run(idle.ahead(), 12) == list(range(12))
    assert set(idle.threads) == {_thread.get_ident()}
    assert len(set(busy.threads)) > 1


def test_a_consumer_that_becomes_busy_gets_a_thread_later() -> None:
    slow = Slow()
    ahead = slow.ahead()
    assert run(ahead, 30) == list(range(30))
    assert ahead.ahead == 0 and set(slow.threads) == {_thread.get_ident()}
    assert run(ahead, 30, partial(slow.take, 0.02)) == list(range(30))
    assert ahead.ahead == 1 and slow.threads[-1] != _thread.get_ident()


def test_a_fast_consumer_is_measured_ever_less_often_and_a_slow_one_always() -> None:
    slow = Slow()
    ahead = slow.ahead()
    unmeasured = []
    for _ in range(6):
        assert run(ahead, 2) == [0, 1]
        unmeasured.append(ahead.unmeasured)
        ahead.unmeasured = 0
    assert unmeasured == [8, 16, 32, 64, 64, 64]
    run(ahead, 20, partial(slow.take, 0.02))
    assert ahead.unmeasured == 0
    while not ahead.unmeasured:
        run(ahead, 1)
    assert ahead.unmeasured == 8


def test_a_batch_in_a_thread_is_used_when_its_consumer_has_become_fast() -> None:
    slow = Slow()
    ahead = slow.ahead()
    run(ahead, 8, partial(slow.take, 0.02))
    for number in range(9, 40):  # as long as the slow ones are remembered, and after that
        rows = np.array([number])
        ahead.begin(rows)
        assert ahead.gather(rows)["rows"].tolist() == [number]
        assert slow.asked.count(number) == 1
    assert ahead._pending is None and ahead.ahead == 0


def test_rows_that_were_not_begun_are_gathered_all_the_same() -> None:
    slow = Slow()
    ahead = slow.ahead()
    run(ahead, 8, partial(slow.take, 0.02))
    assert slow.threads[-1] != _thread.get_ident()
    other = np.array([99])
    assert ahead.gather(other)["rows"].tolist() == [99]


def test_a_problem_in_the_thread_comes_to_the_consumer() -> None:
    slow = Slow(problem=MemoryError("no room"))
    with pytest.raises(MemoryError, match="no room"):
        run(slow.ahead(), 12, partial(slow.take, 0.02))
    assert slow.threads[-1] != _thread.get_ident()


def test_a_thread_that_dies_before_it_begins_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one does that finds no memory for its first frame."""
    monkeypatch.setattr(processes_and_threads, "_begin", lambda *_: None)
    slow = Slow()
    assert run(slow.ahead(), 12, partial(slow.take, 0.02)) == list(range(12))
    assert set(slow.threads) == {_thread.get_ident()}
    source, out = np.arange(64, dtype=np.uint8).reshape(16, 4), np.zeros((16, 4), np.uint8)
    cpu_gather._copy_rows(source, np.arange(16), out, 3)
    assert (out == source).all()


def test_a_thread_that_ends_in_the_middle_is_an_error() -> None:
    task = cpu_gather.Task(lambda: None)
    task._call, task._alive = None, lambda: None
    with pytest.raises(MemoryError):
        task.result()


def test_no_thread_is_left_after_a_loop() -> None:
    before = _thread._count()
    slow = Slow()
    gone = weakref.ref(slow)
    ahead = slow.ahead()
    run(ahead, 8, partial(slow.take, 0.02))
    assert slow.threads[-1] != _thread.get_ident()
    go = slow.go
    go.clear()
    ahead.begin(np.array([41]))
    del ahead, slow  # while the next batch is gathered
    go.set()
    deadline = time.monotonic() + 60
    while gone() is not None or _thread._count() > before:  # the thread lives as long as its batch takes
        assert time.monotonic() < deadline
        time.sleep(0.005)
        gc.collect()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_does_not_wait_for_a_thread_it_has_not() -> None:
    slow = Slow(0.05)
    ahead = slow.ahead()
    run(ahead, 6, partial(slow.take, 0.06))
    rows = np.array([41])
    slow.go.clear()
    ahead.begin(rows)
    child = os.fork()
    if child == 0:
        slow.go = threading.Event()
        slow.go.set()
        right = ahead.gather(rows)["rows"].tolist() == [41]
        os._exit(0 if right else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    slow.go.set()
    assert ahead.gather(rows)["rows"].tolist() == [41]


LOOP = """
import sys, tempfile, time, numpy as np, os
os.environ["LEGROOM_DISABLE"] = "1"
import legroom
with tempfile.TemporaryDirectory() as folder:
    np.save(folder + "/a.npy", np.zeros((4000, 20000), np.uint8))
    data = legroom.open(folder + "/a.npy")
    loop = iter(data.batches(200, shuffle=True, format="numpy"))
    for number in range(8):
        next(loop); time.sleep(0.01)
    print("going", flush=True)
    ACT
"""


@pytest.mark.usefixtures("ordinary_exit")
@pytest.mark.parametrize(
    ("act", "status"), [("pass", 0), ("raise SystemExit(3)", 3), ("next(loop)\n    kept = loop, data", 0)]
)
def test_the_interpreter_ends(act: str, status: int) -> None:
    done = subprocess.run([sys.executable, "-c", LOOP.replace("ACT", act)], capture_output=True, text=True, timeout=240)
    assert (done.returncode, done.stderr) == (status, "")


@pytest.mark.usefixtures("ordinary_exit")
def test_control_c_ends_it() -> None:
    # A shell may have started these tests in the background, where Ctrl-C is ignored.
    program = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)\n" + LOOP
    act = "while True:\n        for batch in data.batches(200, format='numpy'): time.sleep(0.002)"
    with subprocess.Popen(
        [sys.executable, "-c", program.replace("ACT", act)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None and process.stdout.readline() == "going\n"
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        _, words = process.communicate(timeout=240)
    assert "KeyboardInterrupt" in words and process.returncode == -signal.SIGINT
