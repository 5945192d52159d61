"""The image classifier keeps to its share of a real GPU, and ends in a sentence when a step does not fit in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
HERE = Path(__file__).parents[2] / "examples" / "image_classifier"


def _run(folder: Path, script: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(HERE / script), *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder)


def test_both_training_runs_on_a_gpu(tmp_path: Path) -> None:
    runs = [
        ("make_images.py", "--out", "datas", "--per_class", "20", "--size", "64"),
        ("train_classifier.py", "--data_dir", "datas", "--image_size", "64", "--epochs", "2", "--memory_fraction", "0.5", "--allow_tf32"),
        ("extract_features.py", "--data_dir", "datas", "--image_size", "64"),
        ("train_transformer.py", "--features_224_dir", "features_64", "--epochs", "2", "--memory_fraction", "0.5", "--allow_tf32"),
    ]  # fmt: skip
    for run in runs:
        done = _run(tmp_path, *run)
        assert done.returncode == 0, (run, done.stdout, done.stderr)
        if run[0].startswith("train"):
            assert "limited to " in done.stdout and "held-out images right" in done.stdout
            assert "the peak of our tensors was" in done.stdout


def test_a_step_that_does_not_fit_its_share(tmp_path: Path) -> None:
    """A share of 2 GB, whatever the GPU's size, and a batch of images that need more."""
    share = (2 << 30) / torch.cuda.get_device_properties(0).total_memory
    assert _run(tmp_path, "make_images.py", "--out", "datas", "--per_class", "20", "--size", "64").returncode == 0
    flags = ("--image_size", "2048", "--batch_size", "16", "--epochs", "1", "--memory_fraction", str(share))
    done = _run(tmp_path, "train_classifier.py", "--data_dir", "datas", *flags)
    assert done.returncode == 1, (done.stdout, done.stderr)
    assert "lower --batch_size" in done.stderr and "Traceback" not in done.stderr
