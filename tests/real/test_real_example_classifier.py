"""The classifier and the transformer on its features run as their README says, and end clearly when they cannot."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from example_modules import EXAMPLES, modules

from legroom import messages

torch = pytest.importorskip("torch")
HERE = EXAMPLES / "image_classifier"
NO_CARD = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def _run(folder: Path, script: str, *flags: str, **environment: str) -> str:
    command = [sys.executable, str(HERE / script), *flags]
    env = {**NO_CARD, **environment}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def _share_right(text: str) -> float:
    *_, (right, of) = re.findall(r"(\d+) of (\d+) held-out images right", text)
    return int(right) / int(of)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with images, a trained classifier and its features; what was printed is beside them."""
    folder = tmp_path_factory.mktemp("classifier")
    _run(folder, "make_images.py", "--out", "datas", "--per_class", "60", "--size", "64")
    trained = _run(
        folder, "train_classifier.py", "--data_dir", "datas", "--batch_size", "16", "--memory_fraction", "0.8",
        "--allow_tf32", "--image_size", "48", "--epochs", "8", "--num_workers", "1",
    )  # fmt: skip
    (folder / "trained.txt").write_text(trained)
    _run(folder, "extract_features.py", "--data_dir", "datas", "--image_size", "48", "--num_workers", "0")
    return folder


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    with modules("image_classifier") as found:
        yield found


def test_the_classifier_learns_and_reports_what_it_does_without_a_gpu(made: Path) -> None:
    said = (made / "trained.txt").read_text()
    assert _share_right(said) > 0.5  # a quarter would be guessing
    assert said.startswith("training on the CPU\n--memory_fraction 0.8 is not applied: ")
    assert "--allow_tf32: no CUDA device: the flags are set, but have no effect on the CPU" in said
    assert "classifier.pt: 4 classes" in said


def test_the_transformer_learns_from_the_features(made: Path, tmp_path: Path) -> None:
    features = ["--features_224_dir", "features_48", "--batch_size", "32", "--epochs", "6", "--out", "transformer.pt"]
    flags = [*features, "--memory_fraction", "0.7", "--allow_tf32"]
    said = _run(made, "train_transformer.py", *flags, LEGROOM_SHM=str(tmp_path))
    assert _share_right(said) > 0.5
    assert said.startswith("training on the CPU\n--memory_fraction 0.7 is not applied: ")
    assert (made / "transformer.pt").stat().st_size > 0
    assert os.listdir(tmp_path) == []  # read in place: nothing was put where shared memory would be


@pytest.mark.parametrize("kind", ["jpg", pytest.param("png", marks=pytest.mark.soak)])
def test_folders_of_jpeg_and_png_with_mixed_precision_and_accumulation(tmp_path: Path, kind: str) -> None:
    _run(tmp_path, "make_images.py", "--out", "datas", "--per_class", "40", "--size", "48", "--format", kind)
    files = sorted((tmp_path / "datas" / "disc").iterdir())
    files[0].rename(files[0].with_suffix(f".{kind.upper()}"))  # as cameras write them
    said = _run(
        tmp_path, "train_classifier.py", "--data_dir", "datas", "--image_size", "32", "--batch_size", "4",
        "--accumulation", "3", "--amp", "--epochs", "4", "--num_workers", "1",
    )  # fmt: skip
    assert "effective batch 4 × 3 = 12" in said and "of 32 held-out images right" in said
    assert _share_right(said) > 0.3


def test_accumulated_batches_take_the_step_of_one(scripts: dict[str, ModuleType]) -> None:
    import argparse

    def trained(batch: int, accumulation: int) -> torch.Tensor:
        torch.manual_seed(0)
        rows, model = torch.randn(11, 4), torch.nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        args = argparse.Namespace(amp=False, accumulation=accumulation)
        steps = scripts["gpu_options"].Steps(optimizer, torch.device("cpu"), args)
        batches = rows[:8].split(batch)
        for number, part in enumerate(batches, 1):
            steps.take(model(part).square().mean(), number, len(batches))
        return model.weight.detach()

    assert torch.allclose(trained(8, 1), trained(2, 4)) and torch.allclose(trained(8, 1), trained(2, 100))
    assert not torch.allclose(trained(8, 1), trained(4, 1))


def test_it_has_chinese_help(
    made: Path, scripts: dict[str, ModuleType], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    messages.speak("zh")
    monkeypatch.chdir(made)
    for script in ("make_images", "train_classifier", "extract_features", "train_transformer"):
        with pytest.raises(SystemExit):
            scripts[script].main(["--help"])
        assert "默认" in capsys.readouterr().out
    scripts["train_transformer"].main([*FEATURES, "--epochs", "1"])
    assert "验证集" in capsys.readouterr().out


IMAGES = ["--data_dir", "datas"]
FEATURES = ["--features_224_dir", "features_48"]
BAD = [
    ("train_classifier", [], "--data_dir"),
    ("train_classifier", ["--data_dir", "nowhere"], "nowhere must hold two folders"),
    ("train_classifier", ["--data_dir", "features_48"], "features_48 must hold two folders"),
    ("train_classifier", [*IMAGES, "--batch_size", "0"], "must be at least 1"),
    ("train_classifier", [*IMAGES, "--image_size", "8"], "must be at least 16"),
    ("train_classifier", [*IMAGES, "--memory_fraction", "1.5"], "1.5 is not above 0 and at most 1"),
    ("train_classifier", [*IMAGES, "--memory_fraction", "most"], "invalid fraction value: 'most'"),
    ("train_classifier", [*IMAGES, "--out", "nowhere/model.pt"], "there is no folder"),
    ("extract_features", [*IMAGES, "--model", "nowhere.pt"], "--model nowhere.pt"),
    ("extract_features", [*IMAGES, "--model", str(HERE / "README.md")], "--model"),
    ("extract_features", [*IMAGES, "--model", "transformer.pt", "--out", "trained.txt"], "trained.txt"),
    ("extract_features", ["--data_dir", "nowhere"], "nowhere must hold two folders"),
    ("train_transformer", ["--features_224_dir", "nowhere"], "unreadable-source"),
    ("train_transformer", [*FEATURES, "--epochs", "0"], "must be at least 1"),
    ("train_transformer", [*FEATURES, "--memory_fraction", "0"], "0.0 is not above 0 and at most 1"),
    ("make_images", ["--per_class", "1"], "--per_class must be at least 2"),
    ("make_images", ["--out", "trained.txt"], "cannot write to trained.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "flags", "said"), BAD, ids=[" ".join([script, *flags]) for script, flags, _ in BAD])
def test_bad_flags_and_missing_files(
    made: Path, scripts: dict[str, ModuleType], script: str, flags: list[str], said: str,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(made)
    with pytest.raises(SystemExit) as ending:
        scripts[script].main(flags)
    assert ending.value.code == 2
    assert said in capsys.readouterr().err


def test_features_of_something_else(
    tmp_path: Path, scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    import h5py

    for name in ("train.h5", "held_out.h5"):
        with h5py.File(tmp_path / name, "w") as file:
            file["features"] = [1, 2, 3]
    with pytest.raises(SystemExit) as ending:
        scripts["train_transformer"].main(["--features_224_dir", str(tmp_path)])
    assert ending.value.code == 2
    assert "is it from extract_features.py?" in capsys.readouterr().err


def test_a_gpu_that_is_full_ends_in_a_sentence(
    scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """The error is torch's own type; that a GPU raises it is for the tests with one."""
    import argparse

    options = scripts["gpu_options"]
    with pytest.raises(SystemExit) as ending, options.within(argparse.ArgumentParser(prog="train")):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
    assert ending.value.code == 1
    assert capsys.readouterr().err.startswith("train: CUDA out of memory")
    with pytest.raises(RuntimeError, match="shapes"), options.within(argparse.ArgumentParser()):
        raise RuntimeError("shapes do not match")
