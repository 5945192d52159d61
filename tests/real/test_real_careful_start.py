"""Memory cgroups in which not even the first samples fit, or not torch itself: a refusal, and nobody is killed."""

from __future__ import annotations

import json
import subprocess
import sys
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
from legroom.loader.measure.private import private_bytes
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


@pytest.mark.parametrize(
    "more", [14, 78]
)  # not even a worker, and all workers but not the first one's samples
def test_where_the_first_samples_do_not_fit_that_is_said(more: int, own: int) -> None:
    with rigs.memory_cgroup(own + more * MB) as group:
        refused = played(group, "start")
    assert refused["code"] == "budget-too-small" and "are free" in refused["why"], refused
    words = ("does not hold 4 workers", "the samples of one batch for each of 4 workers")
    assert any(part in refused["message"] for part in words), refused


@pytest.mark.load_sensitive(
    reason="the guard reads memory at intervals; where it gets no core in time, the kernel kills first"
)
@pytest.mark.parametrize("megabytes", [60, 250])
def test_check_counts_processes_that_it_was_not_told_about(megabytes: int) -> None:
    line = [
        sys.executable,
        "-m",
        "legroom",
        "check",
        "--batch",
        "4",
        "--sample-bytes",
        "1KB",
        "--workers",
        "16",
    ]
    with rigs.memory_cgroup(megabytes * MB) as group:
        done = subprocess.run(group.command([*line, "--json"]), capture_output=True, text=True, timeout=240)
        assert group.oom_kills() == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["verdict"] == "too-big", said
    assert any("trial run" in term["source"] for term in said["terms"])
