"""examples/many_experiments: what it measures is so, it refuses nonsense and leaves nothing behind."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest
from doc_runner import Runner

from legroom.units import parse_size

pytest.importorskip("torch")
HERE = Path(__file__).parents[3] / "examples" / "many_experiments"
ROW = re.compile(r"^ +(\d+) +(\d+) +([\d.]+) +(\d+) +(\S+ \S+) +(\S+ \S+) +(\d+)%$", re.M)
TOGETHER = re.compile(r"^together (\S+ \S+) of RAM, with (one copy|2 copies)", re.M)

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="it reads /proc"),
    pytest.mark.timeout(600),  # four trainings, each a process that imports torch
]


def command(*flags: object) -> list[str]:
    return [sys.executable, str(HERE / "run_experiments.py"), *map(str, flags)]


def run(words: list[str], **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        words, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True, timeout=540
    )


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Runs scripts in forks of a process that has imported torch."""
    process = Runner()
    yield process
    process.close()


def leftovers() -> list[str]:
    places = [Path("/dev/shm"), Path("/var/tmp")]
    return [str(path) for place in places for path in place.glob("legroom-experiments-*")]


def test_experiments_share_one_copy_and_separate_ones_do_not() -> None:
    before = leftovers()
    done = run(command("--gpus", 2, "--jobs_per_gpu", 1, "--size", "64MB", "--steps", 40, "--separate"))
    assert done.returncode == 0, done.stderr
    rows = ROW.findall(done.stdout)
    assert [row[1] for row in rows] == ["0", "1"] * 2, "one on each GPU, shared and then separate"
    assert len({row[2] for row in rows}) == 2, "each has a learning rate of its own"
    held = {kind: parse_size(size) for size, kind in TOGETHER.findall(done.stdout)}
    # The second copy, less what the figures of two runs may differ by.
    assert held["2 copies"] - held["one copy"] > 40 << 20
    assert int(rows[0][6]) > 25, "eight directions: guessing is 12.5 %"
    until = time.monotonic() + 180  # other tests, in other processes, may run the example too
    while set(leftovers()) - set(before) and time.monotonic() < until:
        time.sleep(0.1)
    assert set(leftovers()) <= set(before)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--gpus", "0"], "1 or more"),
        (["--gpus", "-1"], "1 or more"),
        (["--jobs_per_gpu", "0"], "1 or more"),
        (["--steps", "1"], "2 or more"),
        (["--size", "eight"], "bad-size"),
        (["--size", "1EB"], "free"),
        (["--what"], "unrecognized"),
    ],
)
def test_bad_flags(flags: list[str], said: str, forks: Runner, tmp_path: Path) -> None:
    status, output = forks.run(HERE / "run_experiments.py", tmp_path, dict(os.environ), *flags)
    assert status == 2 and said in output and "usage:" in output


BAD_DATA = {
    "gone": "unreadable-source",
    "unlabelled": "missing-key",
    "small": "13 x 13 or larger",
    "worded": "labels must be",
    "short": "labels must be",
}


@pytest.mark.parametrize(("name", "said"), BAD_DATA.items(), ids=BAD_DATA)
def test_an_experiment_refuses_bad_data(tmp_path: Path, name: str, said: str, forks: Runner) -> None:
    labels = {"small": [0] * 4, "worded": [b"cat"] * 4, "short": [0] * 3}
    with h5py.File(tmp_path / f"{name if name != 'gone' else 'other'}.h5", "w") as file:
        side = 8 if name == "small" else 32
        file["images"] = np.zeros((4, side, side, 3), np.uint8)
        if name in labels:
            file["labels"] = labels[name]
    (tmp_path / "shm").mkdir()
    stores = {"LEGROOM_SHM": str(tmp_path / "shm"), "LEGROOM_DIR": str(tmp_path / "disk")}
    flags = ("--h5", str(tmp_path / f"{name}.h5"), "--lr", "0.01")
    status, output = forks.run(HERE / "experiment.py", tmp_path, {**os.environ, **stores}, *flags)
    assert status == 2
    assert said in output and "Traceback" not in output


def test_an_experiment_that_refuses_its_data_ends_the_others(tmp_path: Path) -> None:
    done = run(command("--data", tmp_path / "gone.h5", "--jobs_per_gpu", 1))
    assert done.returncode == 2
    assert "unreadable-source" in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "folder", ["glint_unet", "many_experiments", "audio_diffusion", "image_classifier", "chat_t5", "data_formats"]
)
def test_examples_have_chinese_help_and_readme(folder: str, forks: Runner, tmp_path: Path) -> None:
    """Every script that has flags explains them in Chinese too, and has a README in it."""
    home = Path(__file__).parents[3] / "examples" / folder
    assert (home / "README.zh-CN.md").is_file()
    scripts = [
        path for path in home.glob("*.py") if "ArgumentParser(" in path.read_text() and "def main" in path.read_text()
    ]
    assert scripts
    for script in scripts:
        status, output = forks.run(script, tmp_path, {**os.environ, "LEGROOM_LANG": "zh"}, "--help")
        assert status == 0 and re.search("[一-龥]{4}", output), (script, output)


@pytest.mark.soak
def test_experiments_that_share_workers_decode_each_image_once(tmp_path: Path) -> None:
    pytest.importorskip("PIL")
    script = [sys.executable, str(HERE / "shared_decoding.py"), "--experiments", "3", "--seconds", "4"]
    done = run([*script, "--plot", str(tmp_path / "decoding.svg")])
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("images/s in all") == 2
    assert "<svg" in (tmp_path / "decoding.svg").read_text() and "share=" in (tmp_path / "decoding.svg").read_text()
