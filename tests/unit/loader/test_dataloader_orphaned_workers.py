"""Workers whose program was killed, and workers that wait for each other, where memory is low."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import loader_samples as samples
import pytest
from doc_runner import Runner
from recorded_admissions import record_admissions

from legroom.loader.dataloader import admit_workers_by_memory, worker_shutdown
from legroom.loader.measure_process_memory import BareProcess, FreeMemory

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork", "ignore:This DataLoader will create"),
]
MB = 1 << 20

PROGRAM = """
import multiprocessing, sys, time, warnings
import torch, legroom
from legroom.loader.dataloader import admit_workers_by_memory
from legroom.loader.measure_process_memory import BareProcess, FreeMemory
warnings.filterwarnings("ignore")
admit_workers_by_memory.free_memory_now = lambda: FreeMemory(900 << 20, "here")
admit_workers_by_memory.bare_process = lambda: BareProcess(process=10 << 20, forked=10 << 20)

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 10**9  # it never comes to an end by itself
    def __getitem__(self, index):
        until = time.monotonic() + (0.75 if sys.argv[2] == "first" else 0)
        while time.monotonic() < until: pass  # at work, so the others wait for it
        if sys.argv[2] == "sample":
            time.sleep(600)
        if sys.argv[2] == "pipe":
            return "x" * 1_000_000
        return torch.full((1000,), float(index))

def begun(worker):
    print("worker", worker, flush=True)

if __name__ == "__main__":
    multiprocessing.set_forkserver_preload(["torch", "legroom"])  # instead of importing them in each worker
    budget = 20480 * int(sys.argv[3]) if sys.argv[2] == "memory" else "auto"  # one batch of each worker, not two
    if sys.argv[2] != "first":
        admit_workers_by_memory.free_memory_now = lambda: None  # no admission
    loader = legroom.DataLoader(Rows(), 4, num_workers=int(sys.argv[3]), multiprocessing_context=sys.argv[1],
                                worker_init_fn=begun, prefetch_factor=4, memory_budget=budget)
    iterator = iter(loader)
    if sys.argv[2] in ("memory", "pipe", "middle"):
        next(iterator)
    print("started", flush=True)
    while sys.argv[2] == "middle":
        next(iterator)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Starts programs in forks of a process that has imported torch."""
    process = Runner("torch", "legroom")
    yield process
    process.close()


def of_program(session: int, mark: str) -> list[int]:
    """The processes in this session, and those that have the mark in their environment, but for ended ones."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, its_session = (path / "stat").read_text().rpartition(")")[2].split()[:4]
            if state != "Z" and (int(its_session) == session or mark.encode() in (path / "environ").read_bytes()):
                found.append(int(path.name))
        except OSError:
            continue
    return found


@pytest.mark.load_sensitive(reason="workers notice the end of their program when they get a core")
# first: during admission; sample: in a sample of 10 minutes; pipe: a batch waits for a pipe that no process reads
@pytest.mark.parametrize(
    ("method", "waiting"),
    [
        *(("fork", waiting) for waiting in ("first", "memory", "middle", "sample", "pipe")),
        ("spawn", "first"),
        ("forkserver", "pipe"),
        *(pytest.param("spawn", waiting, marks=pytest.mark.soak) for waiting in ("memory", "middle", "sample", "pipe")),
        *(pytest.param("forkserver", waiting, marks=pytest.mark.soak)
          for waiting in ("first", "memory", "middle", "sample")),
    ],
)  # fmt: skip
def test_no_worker_outlives_a_killed_program(method: str, waiting: str, forks: Runner, tmp_path: Path) -> None:
    script = tmp_path / "program.py"
    script.write_text(PROGRAM)
    mark = str(uuid.uuid4())
    # Each that is spawned imports torch; in admission another one must wait for it.
    workers = {"spawn": "2" if waiting == "first" else "1", "fork": "30", "forkserver": "3"}[method]
    child = forks.start(script, tmp_path, {**os.environ, "MARK": mark}, method, waiting, workers)
    try:
        said = ""
        for said in child.stdout:
            if said.startswith("worker 0" if waiting == "first" else "started"):
                break
        assert said.startswith(("worker 0", "started")), said
        time.sleep(random.random())  # somewhere in the start
        assert len(of_program(child.pid, mark)) > 1, "the program and its workers"
        os.kill(child.pid, signal.SIGKILL)
        child.wait()
        # docs/dataloader.md says 12 s after a worker has begun; on a busy machine spawned ones import torch for 20 s.
        deadline = time.monotonic() + 60
        while (left := of_program(child.pid, mark)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert left == []
    finally:
        child.stdout.close()
        for pid in of_program(child.pid, mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def _low_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "free_memory_now", lambda: FreeMemory(900 * MB, "here"))
    monkeypatch.setattr(admit_workers_by_memory, "bare_process", lambda: BareProcess(process=150 * MB, forked=10 * MB))


@pytest.fixture
def _no_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first worker is waited for until it is done or blocked."""
    monkeypatch.setattr(admit_workers_by_memory, "_FIRST_BATCH_S", {False: 600.0, True: 600.0})


class Together(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """The first sample of each worker is made when all workers make theirs."""

    def __init__(self, barrier: Any, at: str) -> None:
        self.barrier, self.at, self.first = barrier, at, True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.first and self.at == "sample":
            self.barrier.wait(60)
        self.first = False
        return torch.full((300,), float(index))

    def meet(self, worker: int) -> None:
        if self.at == "init":
            self.barrier.wait(60)


@pytest.mark.usefixtures("_low_memory", "_no_time_limit")
@pytest.mark.parametrize("at", ["init", "sample"])
def test_workers_may_wait_for_each_other(at: str, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = record_admissions(monkeypatch)
    context = torch.multiprocessing.get_context("fork")
    dataset = Together(context.Barrier(3), at)
    loader = legroom.DataLoader(dataset, 2, num_workers=3, multiprocessing_context=context, worker_init_fn=dataset.meet)
    assert [int(batch[0, 0]) for batch in loader] == [0, 2, 4, 6, 8, 10]
    (admission,) = [one.admission for one in asked]
    assert admission is not None and not admission.waiting


@pytest.mark.skipif(not samples.OUT_OF_ORDER, reason="this torch has no in_order")
@pytest.mark.usefixtures("_low_memory", "_no_time_limit")
def test_out_of_order_others_overtake_a_blocked_first_worker() -> None:
    context = torch.multiprocessing.get_context("fork")
    dataset = samples.LastFirst(context)
    loader = legroom.DataLoader(dataset, 1, num_workers=2, in_order=False, multiprocessing_context=context)
    got = samples.overtaking(dataset, loader)
    assert sorted(got) == list(range(12)) and got[0] != 0


@pytest.mark.skipif(not samples.OUT_OF_ORDER, reason="this torch has no in_order")
@pytest.mark.usefixtures("_low_memory")
def test_out_of_order_a_busy_first_worker_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admit_workers_by_memory, "_FIRST_BATCH_S", {False: 60.0, True: 0.3})

    class Busy(samples.LastFirst):
        def wait(self) -> None:
            until = time.monotonic() + 60
            while not self.overtaken.is_set() and time.monotonic() < until:
                pass

    context = torch.multiprocessing.get_context("fork")
    dataset = Busy(context)
    loader = legroom.DataLoader(dataset, 1, num_workers=2, in_order=False, multiprocessing_context=context)
    assert samples.overtaking(dataset, loader)[0] != 0


def test_a_busy_process_is_not_blocked_and_a_sleeping_one_is() -> None:
    program = "import sys, time\nprint('begun', flush=True)\nwhile sys.argv[1:]: pass\ntime.sleep(600)"
    # Blocked is what has waited for a second: one that sleeps may be seen late, one at work is not seen within 3 s.
    for arguments, expected, seconds in (([], True, 60), (["work"], False, 3)):
        child = subprocess.Popen([sys.executable, "-c", program, *arguments], stdout=subprocess.PIPE)
        assert child.stdout is not None
        try:
            assert child.stdout.readline()  # an interpreter that starts waits for the disk
            blocked, until = worker_shutdown.BlockedCheck(), time.monotonic() + seconds
            while not (found := blocked.blocked(child.pid)) and time.monotonic() < until:
                time.sleep(0.01)
            assert found == expected
        finally:
            child.stdout.close()
            child.kill()
            child.wait()
    assert not worker_shutdown.BlockedCheck().blocked(child.pid)  # there is none


def test_a_younger_process_is_not_the_parent(monkeypatch: pytest.MonkeyPatch) -> None:
    program = SimpleNamespace(pid=os.getppid())
    assert worker_shutdown.program_alive()  # started by no other program
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: program)
    assert worker_shutdown.program_alive()
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.05)
        program.pid = child.pid
        assert not worker_shutdown.program_alive()  # younger than this one: it has the program's old number
        monkeypatch.setattr(worker_shutdown._Stat, "of", lambda _: None)  # /proc does not tell
        assert worker_shutdown.program_alive()
    finally:
        child.kill()
        child.wait()
    assert not worker_shutdown.program_alive()
