"""examples/glint_unet does what its README says: learns, shares one copy, cleans up, refuses nonsense."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import h5py
import numpy as np
import pytest

torch = pytest.importorskip("torch")
HERE = Path(__file__).parents[3] / "examples" / "glint_unet"
Run = Callable[..., "subprocess.CompletedProcess[str]"]

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared copy needs Linux")


def make(folder: Path, count: int) -> Path:
    path = folder / "train_64.h5"
    command = [sys.executable, HERE / "make_data.py", path, "--images", str(count), "--size", "64"]
    subprocess.run(command, check=True, capture_output=True, timeout=240)
    return path


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("enough"), 64)


@pytest.fixture(scope="module")
def few(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("few"), 8)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Run]:
    """Runs a script of the example in an empty directory, with stores of its own; one thread, as cores are few."""
    store = tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm")
    places = {"LEGROOM_SHM": store, "LEGROOM_DIR": str(tmp_path / "disk")}
    environment = {**os.environ, **places, "OMP_NUM_THREADS": "1", "PYTHON": sys.executable}

    def run_script(name: str | Path, *flags: object) -> subprocess.CompletedProcess[str]:
        script = HERE / name
        command = ["sh" if script.suffix == ".sh" else sys.executable, str(script), *map(str, flags)]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=280)

    yield run_script
    shutil.rmtree(store)


@pytest.fixture
def call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Iterator[Run]:
    """Runs a script as ``run`` does, but in this process, which has torch already."""
    store = tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm")
    monkeypatch.setenv("LEGROOM_SHM", store)
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path / "disk"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(HERE)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)

    def call_script(name: str, *flags: object) -> subprocess.CompletedProcess[str]:
        monkeypatch.setattr(sys, "argv", [name, *map(str, flags)])
        status: object = 0
        try:
            runpy.run_path(str(HERE / name), run_name="__main__")
        except SystemExit as end:
            status = end.code
        return subprocess.CompletedProcess(sys.argv, status, *capfd.readouterr())  # type: ignore[arg-type]

    yield call_script
    torch.set_num_threads(threads)
    shutil.rmtree(store)


def errors(output: str, loss: str) -> list[float]:
    """The error in pixels after each epoch."""
    return [float(found) for found in re.findall(rf"^{loss} +epoch .* error ([\d.]+) px", output, re.M)]


def test_it_learns_on_a_shared_copy_that_stays_until_it_is_cleaned_up(call: Run, data: Path, tmp_path: Path) -> None:
    flags = ["--h5", data, "--num_workers", 1, "--batch", 8, "--epochs", 2, "--model_path", "model.pt"]
    trained = call("train_glint_unet.py", "--shared_memory", *flags)
    assert trained.returncode == 0, trained.stderr
    assert "64 images from the shared copy (shm)" in trained.stdout
    after = errors(trained.stdout, "focal")
    assert len(after) == 2 and after[-1] < 3  # untrained: above 20
    assert "head.weight" in torch.load(tmp_path / "model.pt", weights_only=True)

    listed = call("shm_manager.py", "--list", "--h5", data)
    assert "heatmaps" in listed.stdout and "not in use" in listed.stdout
    cleaned = call("train_glint_unet.py", "--h5", data, "--cleanup_shm")
    assert cleaned.returncode == 0 and "removed" in cleaned.stdout
    assert "not loaded" in call("shm_manager.py", "--list", "--h5", data).stdout


def test_two_losses_at_once_on_one_copy(run: Run, few: Path, tmp_path: Path) -> None:
    done = run("train_with_shm.sh", few, "--epochs", 1, "--batch", 8, "--num_workers", 0)
    assert done.returncode == 0, done.stderr
    for loss in ("focal", "hybrid"):
        assert len(errors(done.stdout, loss)) == 1
        assert (tmp_path / f"model_{loss}.pt").exists()
    assert done.stdout.count("MD5 ") == 1, "one copy for both"
    assert "removed 1 entry" in done.stdout
    assert "the cache is empty" in run("shm_manager.py", "--list").stdout


@pytest.mark.parametrize(("flags", "where"), [([], "a copy of its own"), (["--no-preload"], "the file itself")])
def test_without_sharing_nothing_is_left(call: Run, few: Path, flags: list[str], where: str) -> None:
    done = call("train_glint_unet.py", "--h5", few, "--epochs", 1, "--num_workers", 0, *flags)
    assert done.returncode == 0, done.stderr
    assert f"8 images from {where}" in done.stdout
    assert "the cache is empty" in call("shm_manager.py", "--list").stdout


def test_every_unused_entry_is_cleaned_up(run: Run, data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.npy"
    np.save(other, np.arange(10))
    # A training that is under way, as far as its lock goes.
    holder = (
        "import legroom, subprocess, sys\n"
        "with legroom.open(sys.argv[1]) as data:\n"
        "    legroom.open(sys.argv[2]).close()\n"
        "    sys.exit(subprocess.call(sys.argv[3:]))\n"
    )
    (tmp_path / "holder.py").write_text(holder)
    manager = [sys.executable, HERE / "shm_manager.py"]
    kept = run(tmp_path / "holder.py", data, other, *manager, "--cleanup-all")
    assert kept.returncode == 1
    assert "removed 1 entry" in kept.stdout and data.name in kept.stdout
    refused = run(tmp_path / "holder.py", data, other, *manager, "--cleanup", "--h5", data)
    assert refused.returncode == 1 and "entry-in-use" in refused.stderr
    assert run("shm_manager.py", "--cleanup-all").returncode == 0
    assert "the cache is empty" in run("shm_manager.py", "--list").stdout


BAD = {
    "no file": ("train_glint_unet.py", ["--h5", "gone.h5", "--shared_memory"], "unreadable-source"),
    "no file, no sharing": ("train_glint_unet.py", ["--h5", "gone.h5"], "cannot read gone.h5"),
    "not HDF5": ("train_glint_unet.py", ["--h5", "words.h5", "--shared_memory"], "unknown-format"),
    "no heatmaps": ("train_glint_unet.py", ["--h5", "half.h5", "--shared_memory"], "missing-key"),
    "no heatmaps, no sharing": ("train_glint_unet.py", ["--h5", "half.h5"], "missing-key"),
    "a group, no sharing": ("train_glint_unet.py", ["--h5", "group.h5"], "missing-key"),
    "shapes": ("train_glint_unet.py", ["--h5", "shapes.h5", "--shared_memory"], "must both be"),
    "odd sides": ("train_glint_unet.py", ["--h5", "odd.h5", "--shared_memory"], "must divide by 4"),
    "loss": ("train_glint_unet.py", ["--h5", "odd.h5", "--loss", "none"], "invalid choice"),
    "batch": ("train_glint_unet.py", ["--h5", "odd.h5", "--batch", "0"], "1 or more"),
    "model": ("train_glint_unet.py", ["--h5", "odd.h5", "--model_path", "no/m.pt"], "no directory no"),
    "model, a directory": ("train_glint_unet.py", ["--h5", "odd.h5", "--model_path", "."], "a directory"),
    "seed": ("train_glint_unet.py", ["--h5", "odd.h5", "--seed", str(2**63)], "below 2**63"),
    "no flags": ("train_glint_unet.py", [], "--h5"),
    "clean up what": ("shm_manager.py", ["--cleanup"], "needs --h5"),
    "clean up all of what": ("shm_manager.py", ["--cleanup-all", "--h5", "odd.h5"], "takes no --h5"),
    "list what": ("shm_manager.py", ["--list", "--h5", "gone.h5"], "no file gone.h5"),
    "do what": ("shm_manager.py", [], "required"),
    "images": ("make_data.py", ["--images", "1"], "at least 2"),
    "size": ("make_data.py", ["--size", "63"], "divide by 4"),
    "where": ("make_data.py", ["no/such/place.h5", "--images", "2"], "cannot write"),
}


@pytest.fixture
def bad_files(tmp_path: Path) -> None:
    (tmp_path / "words.h5").write_text("not HDF5 at all\n" * 100)
    shapes = {
        "half": {"images": (4, 8, 8)},
        "shapes": {"images": (4, 8, 8), "heatmaps": (4, 4, 4)},
        "odd": {"images": (4, 10, 10), "heatmaps": (4, 10, 10)},
    }
    for name, arrays in shapes.items():
        with h5py.File(tmp_path / f"{name}.h5", "w") as file:
            for key, shape in arrays.items():
                file[key] = np.zeros(shape, np.uint8)
    with h5py.File(tmp_path / "group.h5", "w") as file:
        file.create_group("images")


@pytest.mark.parametrize(("script", "flags", "said"), BAD.values(), ids=BAD)
def test_nonsense_ends_in_a_clear_error(call: Run, bad_files: None, script: str, flags: list[str], said: str) -> None:
    done = call(script, *flags)
    assert done.returncode == 2, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr


def test_the_script_fails_when_a_training_run_does(run: Run) -> None:
    done = run("train_with_shm.sh", "gone.h5")
    assert done.returncode == 2 and done.stderr.count("unreadable-source") == 2


def test_a_copy_that_is_not_there_cannot_be_cleaned_up(call: Run, data: Path) -> None:
    done = call("shm_manager.py", "--cleanup", "--h5", data)
    assert done.returncode == 1 and "not-loaded" in done.stderr and "cache load" not in done.stderr


def test_the_error_is_the_distance_to_the_nearest_peak_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(HERE)
    from glints import pixel_errors

    truth, found = torch.zeros(2, 1, 32, 32), torch.zeros(2, 1, 32, 32)
    truth[0, 0, 4, 4] = truth[0, 0, 20, 20] = truth[1, 0, 8, 8] = 1
    found[0, 0, 4, 7], found[0, 0, 20, 20] = 0.2, 0.9  # 3 to the right, exact
    found[0, 0, 20, 21] = 0.8  # beside a peak, so none itself
    found[1, 0, 8, 8], found[1, 0, 30, 8] = 0.4, 0.6  # a stronger one far off takes its place
    assert sorted(pixel_errors(found, truth).tolist()) == [0, 3, 22]
    assert len(pixel_errors(found, torch.zeros_like(truth))) == 0
