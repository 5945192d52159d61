"""``srun --ntasks-per-node=1 legroom cache load`` with Debian's munge, slurmctld and slurmd."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import slurm_rig

from object_server import object_server

ROOT = Path(__file__).parents[2]
pytestmark = [
    pytest.mark.nodes,
    pytest.mark.timeout(300),
    pytest.mark.skipif(slurm_rig.why_not() is not None, reason=str(slurm_rig.why_not())),
]


@pytest.fixture
def slurm() -> Iterator[dict[str, str]]:
    with slurm_rig.slurm() as environment:
        yield environment


def test_one_task_on_each_node_loads(slurm: dict[str, str], tmp_path: Path) -> None:
    file = io.BytesIO()
    np.save(file, np.arange(1_000_000))
    for name in ("shm", "disk"):
        (tmp_path / name).mkdir(mode=0o700)
    slurm |= {
        "LEGROOM_SHM": str(tmp_path / "shm"),
        "LEGROOM_DIR": str(tmp_path / "disk"),
        "PYTHONPATH": str(ROOT / "src"),
    }
    with object_server(x__npy=file.getvalue()) as server:
        load = [sys.executable, "-m", "legroom", "cache", "load", server.url("x.npy"), "--json"]
        command = ["srun", "--nodes=1", "--ntasks-per-node=1", *load]
        done = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)["entries"][0]["built"] is True
        again = subprocess.run(command, env=slurm, capture_output=True, text=True, timeout=120)
        assert json.loads(again.stdout)["entries"][0]["built"] is False
        assert server.sent == len(file.getvalue())
