"""legroom.DataLoader in memory cgroups that are too small for it, or almost: no process is ever killed.

Four workers with batches of 24 MB. torch's loader is killed in all of these. Sizes are what is left beside torch itself.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rigs

from torch_memory import beside_torch

pytest.importorskip("torch")
pytestmark = pytest.mark.real("cgroup")
HERE = Path(__file__).parent
MB = 1 << 20


def played(megabytes: int, *, custom: bool = False) -> dict[str, Any]:
    options = json.dumps({"custom": custom, "num_workers": 4, "prefetch_factor": 2})
    with rigs.memory_cgroup(beside_torch(megabytes)) as group:
        line = [sys.executable, "-W", "error", str(HERE / "room_player.py"), options]
        done = subprocess.run(group.command(line), capture_output=True, text=True, timeout=240)
        assert group.oom_kills() == 0, (done.returncode, done.stderr[-2000:])
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    if found["check"] == "fits":  # never a wrong yes
        assert "good" in found["found"], found
    assert all(one == {"good": True} for one in found["smaller"].values()), found
    return found


def test_too_little_for_four_workers_is_refused_before_a_batch_and_what_fits_runs() -> None:
    found = played(150)
    assert found["check"] == "too-big" and found["plan"] is not None and found["plan"][0] < 4
    assert found["found"]["seen"] == 0
    refused = found["found"]["refused"]
    assert refused["code"] == "budget-too-small" and "4 workers with one batch each" in refused["message"]
    assert "are free" in refused["why"] and "while it makes a batch" in refused["why"]
    assert any(step.startswith("num_workers=") for step in found["smaller"]), found


def test_at_the_edge_it_runs_or_refuses() -> None:
    found = played(300)
    assert found["found"].get("good") or found["found"]["refused"]


def test_where_there_is_room_for_one_batch_a_worker_that_must_do() -> None:
    found = played(450)
    assert found["found"] == {"good": True} and found["check"] == "fits", found


def test_a_collate_that_makes_the_batch_beside_its_samples_is_counted() -> None:
    plain, custom = played(900), played(900, custom=True)  # room for the trial run of both to its end
    assert custom["need"] > plain["need"] + 20 * MB  # a batch of 24 MB, and more where workers make theirs at once


def test_check_of_a_named_dataset_counts_the_process_that_is_yet_to_come() -> None:
    line = [sys.executable, "-m", "legroom", "check", "--batch", "4", "--dataset", "room_player:images"]
    line += ["--workers", "4", "--loader", "legroom", "--json"]
    with rigs.memory_cgroup(beside_torch(250)) as group:
        done = subprocess.run(group.command(line), capture_output=True, text=True, timeout=240, cwd=HERE)
        assert group.oom_kills() == 0, done.stderr[-2000:]
    said = json.loads(done.stdout)
    assert done.returncode == 1 and said["verdict"] == "too-big", (done.stdout, done.stderr[-2000:])
    # What the trial had when it was stopped, or the prediction where that is more: both have the main process.
    told = [term["what"] + term["source"] for term in said["terms"] if term["pool"] == "ram"]
    assert any("stopped at" in one or "the main process of a trial run" in one for one in told), said["terms"]
