"""legroom.DataLoader where torch's dies: a small /dev/shm, killed workers, a memory cgroup, Ctrl-C; and inside frameworks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import rigs

pytest.importorskip("torch")
PLAYER = Path(__file__).with_name("loader_player.py")
MB = 1 << 20
EIGHT = {"megabytes": 24, "count": 96, "num_workers": 4, "prefetch_factor": 2}


def command(name: str, **arguments: Any) -> list[str]:
    return [sys.executable, "-W", "error", str(PLAYER), name, json.dumps(arguments)]


def played(line: list[str], timeout: float = 240) -> dict[str, Any]:
    done = subprocess.run(line, capture_output=True, text=True, timeout=timeout)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


@pytest.mark.real("mount")
def test_torchs_loader_fails_in_a_small_shm() -> None:
    # Where the lack meets the thread behind a worker's queue, that batch is lost in silence and the loader hangs.
    found = played(rigs.small_shm(command("epoch", which="torch", timeout=20, **EIGHT)))
    assert "shared memory" in found["failed"] or "timed out" in found["failed"]


@pytest.mark.real("mount")
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_ours_finishes_and_leaves_shm_alone(method: str) -> None:
    line = command("epoch", which="legroom", multiprocessing_context=method, **EIGHT)
    found = played(rigs.small_shm(line))
    # Semaphores of multiprocessing's queues lie there, a page each; batches do not.
    assert found == {"good": True, "seen": 96, "peak": found["peak"], "transport": "arena"}
    assert found["peak"] < MB // 4


@pytest.mark.real("mount")
@pytest.mark.parametrize(
    "options",
    [{"keep": True}, {"own_collate": True}, {"memory_budget": "100MB"}, {"persistent_workers": True, "keep": True}],
    ids=str,
)
def test_in_a_small_shm_whatever_is_asked(options: dict[str, Any]) -> None:
    found = played(rigs.small_shm(command("epoch", which="legroom", **{**EIGHT, "count": 64, **options})))
    assert found["good"] and found["seen"] == 64 and found["peak"] < MB // 4


@pytest.mark.real("mount")
def test_accelerate_keeps_the_transport() -> None:
    pytest.importorskip("accelerate")
    found = played(rigs.small_shm(command("with_accelerate")))
    assert found["good"] and found["seen"] == 48 and found["peak"] < MB // 4
    assert found["class"] == "DataLoaderShard"


@pytest.mark.real("mount")
def test_lightning_keeps_the_transport() -> None:
    pytest.importorskip("lightning")
    found = played([part for part in rigs.small_shm(command("with_lightning")) if part not in ("-W", "error")])
    assert found["good"] and found["seen"] == 48 and found["peak"] < MB // 4
    assert found["class"] and found["again"] == "arena" and found["budget"] == "64MB" and found["rest"]["good"]
    assert found["kinds"] == ["legroom.loader.dataloader.dataloader"]


@contextlib.contextmanager
def _counted_apart() -> Iterator[Callable[[list[str]], list[str]]]:
    """A group of its own where one can be had: the OOM kills of tests beside this one are not counted in it."""
    if rigs.why_not_cgroup() is not None:
        yield list
        return
    with rigs.memory_cgroup(4 << 30) as group:
        yield group.command


@pytest.mark.load_sensitive(reason="on a busy machine a process may wait five seconds for a core")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGBUS])
@pytest.mark.parametrize("busy", [False, True], ids=["while waiting", "in the middle of a step"])
def test_a_killed_worker_is_explained_within_five_seconds(number: int, busy: bool) -> None:
    with _counted_apart() as place:
        found = played(place(command("death", number=int(number), busy=busy)))
    assert found["kind"] == "WorkerDied", found
    assert signal.Signals(number).name in found["text"] and "do:" in found["text"]
    assert "DataLoader worker" in found["cause"]
    assert found["after"] < 5
    if number == signal.SIGKILL:
        assert "not the kernel's OOM killer" in found["text"] or "is unknown" in found["text"]


@pytest.mark.real("cgroup")
def test_an_oom_kill_is_distinguished_from_other_kills() -> None:
    with rigs.memory_cgroup(700 * MB) as group:
        line = group.command(
            ["sh", "-c", f"echo 1000 > /proc/self/oom_score_adj; {_quoted(command('death', number=0, hog=True))}"]
        )
        # The parent must not be the one that dies: it is small beside what the worker takes.
        found = played(line)
        assert group.oom_kills() >= 1
    assert found["kind"] == "WorkerDied" and "OOM killer: oom_kill" in found["text"], found
    assert "num_workers=1" in found["text"]


@pytest.mark.real("cgroup")
def test_in_a_small_cgroup_reserving_causes_no_oom_kill() -> None:
    # The processes themselves take about 410 MB here; 4 workers × 4 slots of 24 MB would be 384 MB more.
    with rigs.memory_cgroup(720 * MB) as group:
        found = played(group.command(command("epoch", which="legroom", **EIGHT)))
        assert group.oom_kills() == 0
    assert found["good"] and found["seen"] == 96


def test_ctrl_c_leaves_no_process_and_no_memory() -> None:
    child = subprocess.Popen(command("forever"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                             start_new_session=True)  # fmt: skip
    assert child.stdout is not None
    workers = json.loads(child.stdout.readline())["workers"]
    assert workers
    os.killpg(child.pid, signal.SIGINT)  # as the terminal does: to all of them
    child.wait(timeout=240)
    child.stdout.close()
    deadline = time.monotonic() + 60
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not [pid for pid in workers if _alive(pid)]


def test_a_killed_trainer_leaves_no_worker() -> None:
    child = subprocess.Popen(command("forever"), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert child.stdout is not None
    workers = json.loads(child.stdout.readline())["workers"]
    child.kill()
    child.wait()
    child.stdout.close()
    deadline = time.monotonic() + 60  # workers look every five seconds whether they have a parent
    while any(_alive(pid) for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if _alive(pid)]


def _alive(pid: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return False


def _quoted(line: list[str]) -> str:
    import shlex

    return "exec " + shlex.join(line)
