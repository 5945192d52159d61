"""examples/many_experiments in a container that holds some of the experiments asked for: those run, and none is killed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import rigs

pytest.importorskip("torch")
SCRIPT = Path(__file__).parents[2] / "examples" / "many_experiments" / "run_experiments.py"
RSS = "import re, torch; print(re.search(r'VmRSS:\\s+(\\d+)', open('/proc/self/status').read())[1])"


@pytest.mark.soak
@pytest.mark.real("cgroup")
def test_no_more_are_started_than_fit() -> None:
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}  # a CUDA context takes host memory of its own
    one = int(subprocess.check_output([sys.executable, "-c", RSS], env=environment)) * 1024
    with rigs.memory_cgroup(3 * one + (200 << 20)) as group:
        command = [sys.executable, SCRIPT, "--gpus=1", "--jobs_per_gpu=8", "--size=4MB", "--steps=4"]
        done = subprocess.run(
            group.command(list(map(str, command))), env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, done.stderr
        assert group.oom_kills() == 0
    header, _, table = done.stdout.partition("RAM (PSS)")
    assert " short" in header and "; running 1 x " in header
    assert 1 <= table.count("%") < 8
