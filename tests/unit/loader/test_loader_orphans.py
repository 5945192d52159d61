"""Workers whose program was killed, and workers that wait for each other, where memory is short and the start careful."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import uuid
from pathlib import Path
from typing import Any

import pytest

from legroom.loader.arena import door as arena_door
from legroom.loader.arena import processes
from legroom.loader.arena.refusal import Left
from legroom.loader.measure.bare import Bare

torch = pytest.importorskip("torch")
import legroom  # noqa: E402  its DataLoader needs torch

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="slots need memfd"),
    pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork", "ignore:This DataLoader will create"),
]
MB = 1 << 20

PROGRAM = """
import sys, time, warnings
import torch, legroom
from legroom.loader.arena import door
from legroom.loader.arena.refusal import Left
from legroom.loader.measure.bare import Bare
warnings.filterwarnings("ignore")
door.left = lambda: Left(900 << 20, "here")
door.bare = lambda: Bare(process=10 << 20, forked=10 << 20)

class Rows(torch.utils.data.Dataset):
    def __len__(self): return 1000
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
    budget = 40960 if sys.argv[2] == "room" else "auto"
    if sys.argv[2] != "first":
        door.left = lambda: None  # no careful start
    loader = legroom.DataLoader(Rows(), 4, num_workers=int(sys.argv[3]), multiprocessing_context=sys.argv[1],
                                worker_init_fn=begun, prefetch_factor=4, memory_budget=budget)
    iterator = iter(loader)
    if sys.argv[2] in ("room", "pipe", "middle"):
        next(iterator)
    print("started", flush=True)
    while sys.argv[2] == "middle":
        next(iterator)
    time.sleep(600)
"""


def marked(mark: str) -> list[int]:
    """The processes that have this in their environment, but for ended ones."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            if (
                mark.encode() in (path / "environ").read_bytes()
                and "\nState:\tZ" not in (path / "status").read_text()
            ):
                found.append(int(path.name))
        except OSError:
            continue
    return found


# first: in the careful start; sample: in a sample of 10 minutes; pipe: a batch waits for a pipe that no process reads
@pytest.mark.parametrize("waiting", ["first", "room", "middle", "sample", "pipe"])
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_no_worker_outlives_a_program_that_is_killed(method: str, waiting: str, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    mark = str(uuid.uuid4())
    line = [sys.executable, str(tmp_path / "program.py"), method, waiting, "30" if method == "fork" else "3"]
    child = subprocess.Popen(line, stdout=subprocess.PIPE, text=True, env={**os.environ, "MARK": mark})
    assert child.stdout is not None
    try:
        for said in child.stdout:
            if said.startswith("worker 0" if waiting == "first" else "started"):
                break
        time.sleep(random.random())  # somewhere in the start
        child.send_signal(signal.SIGKILL)
        child.wait()
        # docs/dataloader.md says 12 s after a worker has begun; on a busy machine spawned ones import torch for 20 s.
        deadline = time.monotonic() + 60
        while marked(mark) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert marked(mark) == []
    finally:
        child.stdout.close()
        for pid in marked(mark):
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def _little(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_door, "left", lambda: Left(900 * MB, "here"))
    monkeypatch.setattr(arena_door, "bare", lambda: Bare(process=150 * MB, forked=10 * MB))


class Together(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    """The first sample of each worker is made when all workers make theirs."""

    def __init__(self, barrier: Any, at: str) -> None:
        self.barrier, self.at, self.first = barrier, at, True

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        if self.first and self.at == "sample":
            self.barrier.wait(20)
        self.first = False
        return torch.full((300,), float(index))

    def meet(self, worker: int) -> None:
        if self.at == "init":
            self.barrier.wait(20)


@pytest.mark.usefixtures("_little")
@pytest.mark.parametrize("at", ["init", "sample"])
def test_workers_that_wait_for_each_other_meet(at: str) -> None:
    context = torch.multiprocessing.get_context("fork")
    dataset = Together(context.Barrier(3), at)
    loader = legroom.DataLoader(
        dataset, 2, num_workers=3, multiprocessing_context=context, worker_init_fn=dataset.meet
    )
    assert [int(batch[0, 0]) for batch in loader] == [0, 2, 4, 6, 8, 10]
    assert loader._last_door is not None and not loader._last_door.waited_for


class SlowFirst(torch.utils.data.Dataset):  # type: ignore[misc, name-defined]
    def __init__(self, seconds: float) -> None:
        self.seconds = seconds

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> Any:
        time.sleep(self.seconds * (index == 0))
        return torch.full((300,), float(index))


@pytest.mark.usefixtures("_little")
def test_out_of_order_others_overtake_a_first_that_waits() -> None:
    loader = legroom.DataLoader(
        SlowFirst(6), 1, num_workers=2, in_order=False, multiprocessing_context="fork"
    )
    got = [int(batch[0, 0]) for batch in loader]
    assert sorted(got) == list(range(12)) and got[0] != 0


@pytest.mark.usefixtures("_little")
def test_out_of_order_a_first_at_work_is_not_waited_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arena_door, "_PATIENCE_S", {False: 60.0, True: 0.3})

    class Busy(SlowFirst):
        def __getitem__(self, index: int) -> Any:
            until = time.monotonic() + self.seconds * (index == 0)
            while time.monotonic() < until:
                pass
            return torch.full((300,), float(index))

    loader = legroom.DataLoader(Busy(3), 1, num_workers=2, in_order=False, multiprocessing_context="fork")
    assert next(iter(loader))[0, 0] != 0


def test_a_process_at_work_is_not_blocked_and_one_that_sleeps_is() -> None:
    program = "import sys, time\nwhile sys.argv[1:]: pass\ntime.sleep(60)"
    # Blocked is what has waited for a second: one that sleeps may be seen late, one at work is not seen within 3 s.
    for arguments, expected, seconds in (([], True, 8), (["work"], False, 3)):
        child = subprocess.Popen([sys.executable, "-c", program, *arguments])
        try:
            blocked, until = processes.Blocked(), time.monotonic() + seconds
            while not (found := blocked.now(child.pid)) and time.monotonic() < until:
                time.sleep(0.01)
            assert found == expected
        finally:
            child.kill()
            child.wait()
    assert not processes.Blocked().now(child.pid)  # there is none


def test_a_parent_is_the_process_that_was_there_before(monkeypatch: pytest.MonkeyPatch) -> None:
    assert processes.parent_lives()
    assert processes._runs(os.getppid())
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        time.sleep(0.05)
        assert not processes._runs(
            child.pid
        )  # younger than this one: another process with the parent's old number
        monkeypatch.setattr(processes, "_stat", lambda _: None)  # /proc does not tell
        assert processes._runs(child.pid)
    finally:
        child.kill()
        child.wait()
    assert not processes._runs(child.pid)
