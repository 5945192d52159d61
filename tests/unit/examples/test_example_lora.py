"""The LoRA example on the CPU: two fine-tunes on one copy of the base have the losses that they have apart."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
ROOT = Path(__file__).parents[3]


@pytest.mark.soak
@pytest.mark.timeout(660)  # five processes that import torch
def test_two_fine_tunes_train_as_they_do_apart(tmp_path: Path) -> None:
    folders = {"LEGROOM_SHM": tmp_path / "memory", "LEGROOM_DIR": tmp_path / "disk"}
    for folder in folders.values():
        folder.mkdir()
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT / "src")}
    env |= {name: str(folder) for name, folder in folders.items()}
    script = ROOT / "examples" / "lora_shared_base" / "two_finetunes.py"
    command = [sys.executable, str(script), "--device", "cpu", "--width", "32", "--layers", "1", "--steps", "5"]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("in RAM, shared by all processes") == 3
    assert "largest difference between together and apart: 0.0e+00" in done.stdout, done.stdout
