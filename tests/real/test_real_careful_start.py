"""Memory cgroups in which not even the first samples fit, or not torch itself: a refusal, and nobody is killed."""

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
pytestmark = pytest.mark.real("cgroup")
MB = 1 << 20

PROGRAM = """
import json, sys, warnings
import torch, legroom
from legroom.errors import BudgetTooSmall
from legroom.loader.measure_process_memory import private_bytes
warnings.filterwarnings("ignore")
class Images(torch.utils.data.Dataset):
    def __len__(self): return 64
    def __getitem__(self, index): return torch.full((6 << 18,), float(index))
loader = legroom.DataLoader(Images(), 4, num_workers=4, prefetch_factor=2, multiprocessing_context="fork")
try:
    if sys.argv[1:]:
        next(iter(loader))
    print(json.dumps({"own": private_bytes()}))
except BudgetTooSmall as problem:
    print(json.dumps(problem.as_dict()))
"""


def played(group: rigs.Cgroup, *arguments: str) -> dict[str, Any]:
    line = [sys.executable, "-c", PROGRAM, *arguments]
    done = subprocess.run(group.command(line), capture_output=True, text=True, timeout=240)
    assert group.oom_kills() == 0 and done.returncode == 0, (done.returncode, done.stderr[-2000:])
    told: dict[str, Any] = json.loads(done.stdout)
    return told


@pytest.fixture(scope="module")
def own() -> int:
    """What the program takes by itself, with this Python and this torch."""
    with rigs.memory_cgroup(4000 * MB) as group:
        return int(played(group)["own"])


@pytest.mark.parametrize("more", [14, 78])  # not even a worker, and all workers but not the first one's samples
def test_where_the_first_samples_do_not_fit_that_is_reported(more: int, own: int) -> None:
    with rigs.memory_cgroup(own + more * MB) as group:
        refused = played(group, "start")
    assert refused["code"] == "budget-too-small" and "are free" in refused["why"], refused
    words = ("not enough free memory for 4 workers",)
    assert any(part in refused["message"] for part in words), refused


CHECK = [sys.executable, "-m", "legroom", "check", "--batch", "4", "--sample-bytes", "1KB", "--workers", "16", "--json"]


@pytest.mark.parametrize("megabytes", [60, 250])
def test_check_counts_processes_that_were_not_given(megabytes: int) -> None:
    """Whether the guard stops the trial run or the OOM killer does, the answer is no and nothing else is killed."""
    with rigs.memory_cgroup(megabytes * MB) as group, _other_process(group) as other:
        done = subprocess.run(group.command(CHECK), capture_output=True, text=True, timeout=240)
        assert other.poll() is None
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["verdict"] == "too-big", said
    assert any("trial run" in term["source"] for term in said["terms"])


def test_a_guard_that_gets_no_core_leaves_the_trial_run_to_the_oom_killer() -> None:
    """The latest that a guard can be: it stands still until the kernel has killed."""
    with rigs.memory_cgroup(250 * MB) as group, _other_process(group) as other:
        for _ in range(5):  # where this process gets no core in time, the guard comes first: then again
            check = subprocess.Popen(group.command(CHECK), stdout=subprocess.PIPE, text=True)
            _stop_guard_until_the_kill(group, check)
            said = json.loads(check.communicate(timeout=240)[0])
            assert other.poll() is None
            assert check.returncode == 1 and said["verdict"] == "too-big", said
            if group.oom_kills():
                break
        else:
            raise AssertionError("the guard was never stopped in time")


@contextlib.contextmanager
def _other_process(group: rigs.Cgroup) -> Iterator[subprocess.Popen[bytes]]:
    """A process of the user that holds memory in the same cgroup."""
    line = [sys.executable, "-S", "-c", "held = b'x' * (8 << 20); import time; print(flush=True); time.sleep(600)"]
    process = subprocess.Popen(group.command(line), stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def _stop_guard_until_the_kill(group: rigs.Cgroup, check: subprocess.Popen[str]) -> None:
    """Stop the guard as soon as it watches a trial run; let it continue when the kernel has killed, or nothing is left."""
    guard = _until(lambda: _trial_guard(group) or (check.poll() is not None and -1), 120)
    if guard == -1:
        return
    with contextlib.suppress(ProcessLookupError):
        os.kill(guard, signal.SIGSTOP)
        try:
            _until(lambda: group.oom_kills() or _trial_guard(group) is None, 120)
        finally:
            os.kill(guard, signal.SIGCONT)


def _trial_guard(group: rigs.Cgroup) -> int | None:
    """The guard, once the trial run that it watches has been started."""
    lines = {}
    for pid in (group.path / "cgroup.procs").read_text().split():
        with contextlib.suppress(OSError):
            lines[int(pid)] = Path(f"/proc/{pid}/cmdline").read_bytes()
    if not any(b"legroom.loader.measure.dataloader_trial" in line for line in lines.values()):
        return None
    return next((pid for pid, line in lines.items() if b"memory_guard_script.py" in line), None)


def _until(found: Callable[[], int | bool | None], seconds: float) -> int:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.01)
    raise AssertionError(f"{found} not within {seconds} s")
