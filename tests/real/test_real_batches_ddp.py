"""Two ranks train on 97 rows with DDP: neither waits for a batch that the other has not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.distributed.is_available():
    pytest.skip("this torch has no torch.distributed", allow_module_level=True)

PLAYER = Path(__file__).with_name("ddp_player.py")
ROWS, WORLD, EPOCHS = 97, 2, 2


def _train(folder: Path) -> list[dict[str, Any]]:
    """What each rank did under pad, and under drop."""
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        file["images"] = np.random.default_rng(0).random((ROWS, 4, 3), np.float32)
        file["labels"] = np.arange(ROWS)
    env = {**os.environ, "WORLD_SIZE": str(WORLD)}
    env.pop("SLURM_PROCID", None)
    for variable in ("LEGROOM_SHM", "LEGROOM_DIR"):
        (folder / variable).mkdir(mode=0o700)
        env[variable] = str(folder / variable)
    env.update(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PLAYER), str(path), str(EPOCHS)],
            env={**env, "RANK": str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(WORLD)
    ]
    try:
        shown = [process.communicate(timeout=150) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
            process.wait()
    assert [process.returncode for process in ranks] == [0, 0], [words for _, words in shown]
    told = [[json.loads(line) for line in out.splitlines() if line.startswith("{")] for out, _ in shown]
    return [{"pad": told[rank][0], "drop": told[rank][1]} for rank in range(WORLD)]


def test_ranks_step_together(tmp_path: Path) -> None:
    # 97 rows are 6 whole steps of 2 × 8 and one row more: it is doubled, or left out.
    trained = _train(tmp_path)
    for uneven, steps, rows in (("pad", 7, 98), ("drop", 6, 96)):
        ranks = [rank[uneven] for rank in trained]
        assert [rank["steps"] for rank in ranks] == [[steps] * EPOCHS] * WORLD
        assert ranks[0]["weight"] == ranks[1]["weight"]
        for epoch in range(EPOCHS):
            part = slice(epoch * steps, (epoch + 1) * steps)
            seen = [label for rank in ranks for batch in rank["seen"][part] for label in batch]
            assert len(seen) == rows
            assert len(set(seen)) == min(rows, ROWS)
        assert ranks[0]["seen"][0] != ranks[0]["seen"][steps]  # another order in the second epoch
