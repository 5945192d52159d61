"""Training runs that fail at once without Legroom finish under `legroom run`, with the same effective batch."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rigs

pytest.importorskip("torch")
TRAIN = Path(__file__).with_name("rescue_train.py")
MB = 1 << 20
EPOCHS, SAMPLES, EFFECTIVE = 2, 128, 32


def _train(folder: Path, *more: str) -> list[str]:
    return [sys.executable, str(TRAIN), "--batch", "32", "--num_workers", "4", "--accum_iter=1", "--folder", str(folder), *more]  # fmt: skip


def _rescued(command: list[str], folder: Path) -> list[str]:
    report = str(folder / "report.json")
    asked = ["--checkpoint", f"{folder}/step*.pt", "--resume-flag", "--resume", "--stall", "15s"]
    return [sys.executable, "-m", "legroom", "run", "--retries", "4", "--fresh", "--report", report, *asked, "--", *command]  # fmt: skip


def _clear(folder: Path) -> None:
    assert not (folder / "done.json").exists()
    for left in folder.glob("step*.pt"):
        left.unlink()


def _dies(command: list[str]) -> None:
    """By itself it does not finish: it dies, or, when a worker dies while it holds a lock, waits for ever."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        assert process.wait(timeout=60) != 0
    except subprocess.TimeoutExpired:
        pass  # that it finished nothing is seen by what it left
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # also the workers of one that died
        process.wait()


def _told(done: subprocess.CompletedProcess[str]) -> str:
    return f"{done.returncode}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"


def _check(folder: Path, done: subprocess.CompletedProcess[str], *causes: str) -> dict[str, Any]:
    """It finished, with every sample once an epoch in steps of the effective batch, after deaths of those causes."""
    assert done.returncode == 0, _told(done)
    assert done.stdout.splitlines()[-1] == "done"
    steps = json.loads((folder / "done.json").read_text())
    assert {len(indices) for _, indices in steps} == {EFFECTIVE}
    for epoch in range(EPOCHS):
        trained = [index for at, indices in steps for index in indices if at == epoch]
        assert len(trained) == len(set(trained))  # none twice
        assert set(trained) == set(range(SAMPLES))  # and none left out
    report: dict[str, Any] = json.loads((folder / "report.json").read_text())
    dead, last = report["attempts"][:-1], report["attempts"][-1]
    assert dead and {attempt["verdict"] for attempt in dead} == set(causes), dead
    assert last["verdict"] is None and last["settings"]["batch"] * last["settings"]["accumulation"] == EFFECTIVE
    assert "<svg" in (folder / "report.html").read_text()
    return report


@pytest.mark.real("mount")
def test_a_training_run_in_a_64_mb_dev_shm(tmp_path: Path) -> None:
    command = _train(tmp_path, "--sample-bytes", str(MB))
    _dies(rigs.small_shm(command))
    _clear(tmp_path)
    done = subprocess.run(
        rigs.small_shm(_rescued(command, tmp_path)), capture_output=True, text=True, timeout=250, check=False
    )
    report = _check(tmp_path, done, "shm-full")
    assert report["attempts"][-1]["settings"]["batch"] == 32  # fewer workers were enough


# One batch is larger than /dev/shm: no setting of torch's loader helps but no workers, which prefetch_factor forbids.
LARGE_BATCHES = """
import argparse, torch
from torch.utils.data import DataLoader, Dataset
p = argparse.ArgumentParser()
for name in ("--batch_size", "--num_workers", "--prefetch_factor"): p.add_argument(name, type=int)
a = p.parse_args()
class Samples(Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((2200000,), index, dtype=torch.uint8)
loader = DataLoader(Samples(), a.batch_size, num_workers=a.num_workers, prefetch_factor=a.prefetch_factor)
print("seen", sorted(index for batch in loader for index in batch[:, 0].tolist()) == list(range(64)), flush=True)
"""


@pytest.mark.real("mount")
def test_batches_larger_than_dev_shm_end_with_another_loader(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(LARGE_BATCHES)
    words = [sys.executable, "train.py", "--batch_size", "32", "--num_workers", "2", "--prefetch_factor", "2"]
    command = [sys.executable, "-m", "legroom", "run", "--retries", "3", "--fresh", "--stall", "15s", "--report", "told.json", "--", *words]  # fmt: skip
    done = subprocess.run(
        rigs.small_shm(command), capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "seen True\n"), _told(done)
    assert "attempt 4 of 4: torch's DataLoader → legroom.DataLoader" in done.stderr
    attempts = json.loads((tmp_path / "told.json").read_text())["attempts"]
    assert [attempt["verdict"] for attempt in attempts] == ["shm-full"] * 3 + [None], _told(done)
    assert [attempt["settings"]["workers"] for attempt in attempts] == [2, 2, 1, 1]


@pytest.mark.real("mount")
def test_a_change_that_the_script_refuses_is_undone(tmp_path: Path) -> None:
    """The script's code has persistent_workers=True: torch raises ValueError without workers."""
    given = "prefetch_factor=a.prefetch_factor"
    assert given in LARGE_BATCHES
    (tmp_path / "train.py").write_text(LARGE_BATCHES.replace(given, "persistent_workers=True"))
    words = [sys.executable, "train.py", "--batch_size", "32", "--num_workers", "2"]
    command = [sys.executable, "-m", "legroom", "run", "--retries", "3", "--fresh", "--stall", "15s", "--report", "told.json", "--", *words]  # fmt: skip
    done = subprocess.run(
        rigs.small_shm(command), capture_output=True, text=True, timeout=250, cwd=tmp_path, check=False,
        env={**os.environ, "XDG_STATE_HOME": str(tmp_path / "state")},
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (0, "seen True\n"), _told(done)
    attempts = json.loads((tmp_path / "told.json").read_text())["attempts"]
    assert [attempt["settings"]["workers"] for attempt in attempts] == [2, 0, 1, 1], _told(done)
    assert [attempt["verdict"] for attempt in attempts] == ["shm-full", "not-memory", "shm-full", None]
    assert "num_workers 2 → 1 (undone: num_workers 2 → 0" in done.stderr, _told(done)


@pytest.mark.real("cgroup", "mount")
def test_a_training_run_in_a_1_gb_cgroup(tmp_path: Path) -> None:
    """Workers first, then the micro-batch; the death after the first checkpoint is resumed from it.

    The script keeps the loader's own state, which was taken in larger batches than it goes on with.
    """
    sizes = (
        "--loader",
        "legroom",
        "--sample-bytes",
        "1000",
        "--worker-bytes",
        str(200 * MB),
        "--late-bytes",
        str(24 * MB),
    )
    command = _train(tmp_path, *sizes)
    by_torch = _train(tmp_path, "--loader", "torch", *sizes[2:])
    for bare, killed in ((by_torch, True), (command, False)):  # ours sees it coming and refuses
        with rigs.memory_cgroup(1 << 30) as group:
            dead = subprocess.run(
                # A /dev/shm of its own: what torch's loader leaves there when it is killed goes with it.
                group.command(rigs.small_shm(bare, "2g")),
                capture_output=True,
                text=True,
                timeout=200,
                check=False,
            )
            assert dead.returncode != 0 and (group.oom_kills() > 0) is killed, _told(dead)
        _clear(tmp_path)
    with rigs.memory_cgroup(1 << 30) as group:
        done = subprocess.run(
            group.command(_rescued(command, tmp_path)), capture_output=True, text=True, timeout=250, check=False
        )
        assert [path.name for path in group.path.iterdir() if path.is_dir()] == []  # its own group is gone
    report = _check(tmp_path, done, "ram-allocation", "ram-oom-kill")
    last = report["attempts"][-1]
    assert last["settings"]["batch"] < 32 and last["resumed_from"] is not None
    assert "resumed at epoch" in done.stdout


# Holds what its batch needs itself; its workers hold nothing.
HOLDS_BATCH = """
import argparse, os, signal, time
p = argparse.ArgumentParser()
for name in ("--batch", "--num_workers", "--accum_iter"): p.add_argument(name, type=int)
a = p.parse_args()
workers = [os.fork() for _ in range(a.num_workers)] if a.num_workers else []
if 0 in workers:
    while os.getppid() > 1: time.sleep(0.2)
    os._exit(0)
time.sleep(2.5)
held = bytearray(b"x") * (a.batch * 40 << 20)
print("done", flush=True)
for pid in workers: os.kill(pid, signal.SIGKILL)
"""


@pytest.mark.real("cgroup")
def test_the_batch_is_lowered_first_where_the_process_that_trains_was_killed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(HOLDS_BATCH)
    words = [sys.executable, "train.py", "--batch", "8", "--num_workers", "2", "--accum_iter", "1"]
    command = [sys.executable, "-m", "legroom", "run", "--retries", "2", "--fresh", "--json", "--", *words]
    with rigs.memory_cgroup(256 * MB) as group:
        done = subprocess.run(
            group.command(command), capture_output=True, text=True, timeout=240, cwd=tmp_path, check=False
        )
    first, second = json.loads(done.stdout.splitlines()[-1])["attempts"]
    assert first["verdict"] == "ram-oom-kill" and first["victim"]["role"] == "main", first
    assert second["settings"] == {"batch": 4, "accumulation": 2, "workers": 2} and second["verdict"] is None
