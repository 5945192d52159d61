"""The examples that share one copy, on a real GPU: the glint training learns, two experiments share data and GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]


@pytest.fixture
def stores(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose stores are empty and go at the end."""
    memory = tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm")
    paths = os.pathsep.join([str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    yield {**os.environ, "PYTHONPATH": paths, "LEGROOM_SHM": memory, "LEGROOM_DIR": str(tmp_path / "disk")}
    shutil.rmtree(memory)


def run(script: str, *flags: object, cwd: Path, environment: dict[str, str]) -> str:
    command = [sys.executable, str(ROOT / "examples" / script), *map(str, flags)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_glint_training_run_learns(stores: dict[str, str], tmp_path: Path) -> None:
    run("glint_unet/make_data.py", "train.h5", "--images", 128, cwd=tmp_path, environment=stores)
    flags = ["--h5", "train.h5", "--shared_memory", "--num_workers", 4, "--epochs", 4]
    told = run("glint_unet/train_glint_unet.py", *flags, cwd=tmp_path, environment=stores)
    errors = [float(found) for found in re.findall(r"error ([\d.]+) px", told)]
    assert len(errors) == 4 and errors[-1] < 8  # untrained: about 100


def test_experiments_share_data_and_gpu(stores: dict[str, str], tmp_path: Path) -> None:
    flags = ["--gpus", 1, "--jobs_per_gpu", 2, "--size", "64MB", "--steps", 40]
    told = run("many_experiments/run_experiments.py", *flags, cwd=tmp_path, environment=stores)
    assert "running 1 x 2" in told
    assert len(re.findall(r"\d+%$", told, re.M)) == 2
    assert "with one copy of" in told


@pytest.mark.parametrize("flags", [(), ("--peft",)], ids=["own adapters", "PEFT"])
def test_two_lora_fine_tunes_share_one_base(stores: dict[str, str], tmp_path: Path, flags: tuple[str, ...]) -> None:
    if flags:
        pytest.importorskip("peft")
    said = run("lora_shared_base/two_finetunes.py", "--steps", 20, *flags, cwd=tmp_path, environment=stores)
    print(said)
    size = float(re.search(r"base (\d+) MB", said)[1])  # type: ignore[index]
    apart = float(re.search(r"apart: (\d+) MB", said)[1])  # type: ignore[index]
    together = [float(found) for found in re.findall(r"together: (\d+) MB", said)]
    assert apart >= size and len(together) == 2 and max(together) < size / 4, said
    assert "copied to the GPU here" in said and "shared with other processes" in said
    assert "one copy for 2 processes" in " ".join(said.split()), said
    for first, last in re.findall(r"loss (\S+) -> (\S+)", said):
        assert float(last) < float(first)
