"""The batch finder on the CPU in a real memory cgroup: right, and killed by nobody."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import rigs

pytest.importorskip("torch")
PLAYER = Path(__file__).with_name("finder_player.py")
MB = 1 << 20

pytestmark = [pytest.mark.real("cgroup"), pytest.mark.timeout(600)]


def _play(group: rigs.Cgroup, *arguments: str) -> dict[str, Any]:
    ran = subprocess.run(
        group.command([sys.executable, "-W", "ignore", str(PLAYER), *arguments]),
        capture_output=True, text=True, timeout=500,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr[-2000:]
    told: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return told


def test_the_finder_stays_within_its_cgroup() -> None:
    with rigs.memory_cgroup(700 * MB) as group:
        found = _play(group, "find")
        assert found["bound"] < 700 * MB  # the cgroup's, not the machine's
        assert found["trials"] <= 6
        assert group.oom_kills() == 0, "no trial needed to die here"
        brute = _play(group, "brute", str(found["batch"]), str(int(found["batch"] * 1.15) + 2))
    # Two runs start with a few MB more or less: a sample beyond the 3 % is that.
    assert abs(brute["batch"] - found["batch"]) <= max(1, 0.03 * brute["batch"]) + 1, (found, brute)


def test_a_step_too_large_for_its_cgroup_dies_alone() -> None:
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
            group.command([sys.executable, "-W", "ignore", "-c", code]),
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert ran.returncode == 0, ran.stderr[-2000:]
        assert "does-not-fit" in ran.stdout and "killed it for memory" in ran.stdout
        assert group.oom_kills() >= 1
