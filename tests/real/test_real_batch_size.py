"""find_batch_size on the CPU in a real memory cgroup: the right batch, and no OOM kill of this process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rigs

pytest.importorskip("torch")
SCRIPT = Path(__file__).with_name("batch_size_script.py")
MB = 1 << 20

pytestmark = [pytest.mark.real("cgroup"), pytest.mark.timeout(600)]


def _run_script(group: rigs.Cgroup, *arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        group.command([sys.executable, "-W", "ignore", str(SCRIPT), *arguments]),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    report: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return report


@pytest.mark.soak
def test_search_stays_within_the_cgroup() -> None:
    with rigs.memory_cgroup(700 * MB) as group:
        found = _run_script(group, "find")
        assert found["bound"] < 700 * MB  # the cgroup's, not the machine's
        assert found["trials"] <= 6
        assert group.oom_kills() == 0, "no trial should be killed"
        brute = _run_script(group, "brute", str(found["batch"]), str(int(found["batch"] * 1.15) + 2))
    # Two runs start with a few MB more or less: one sample beyond the 3 %.
    curves = "\n".join(["found:", *found["curve"], "by bisection:", *brute["curve"]])
    assert abs(brute["batch"] - found["batch"]) <= max(1, 0.03 * brute["batch"]) + 1, curves


def test_oversized_step_is_killed_in_its_child_only() -> None:
    code = """
import torch, legroom
from legroom.errors import DoesNotFit
try:
    legroom.gpu.find_batch_size(lambda batch: torch.ones(600 << 20, dtype=torch.uint8), device="cpu")
except DoesNotFit as problem:
    print(problem)
"""
    with rigs.memory_cgroup(500 * MB) as group:
        ran = subprocess.run(
            group.command([sys.executable, "-W", "ignore", "-c", code]), capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "does-not-fit" in ran.stdout and "OOM-killed" in ran.stdout
        assert group.oom_kills() >= 1
