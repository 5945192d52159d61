"""examples/data_formats: every format is trained on, formats with the same data give the same numbers, one copy is shared."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner
from doc_runner import Runner

from legroom.cli.main import cli

for package in ("torch", "pyarrow", "PIL", "lmdb"):
    pytest.importorskip(package)
HERE = Path(__file__).parents[3] / "examples" / "data_formats"
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the shared copy needs Linux")
TOKENS = {
    "tokens": ("nanogpt/train.bin", "--val", "nanogpt/val.bin", "--dtype", "uint16"),
    "llm.c": ("llm_c/train_*.bin", "--val", "llm_c/val_*.bin"),
    "megatron": ("megatron/train.idx", "--val", "megatron/val.idx"),
}
IMAGES = {"webdataset": "shards/train-*.tar", "mds": "mds", "lmdb": "images.lmdb", "imagefolder": "images"}


@pytest.fixture(scope="module")
def forks() -> Iterator[Runner]:
    """Runs scripts in forks of a process that has imported torch; one thread, as cores are few."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        ours = ("legroom.loader.batches.batch_iterator", "legroom.loader.dataloader.dataloader")
        process = Runner("torch", "torch._dynamo", "pyarrow", "PIL.Image", "lmdb", *ours)
    yield process
    process.close()


@pytest.fixture(scope="module")
def data(forks: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("formats")
    status, output = forks.run(HERE / "make_data.py", folder, dict(os.environ), "--samples", "240")
    assert status == 0, output
    return folder / "data"


def test_token_files_of_all_kinds_train_alike(forks: Runner, data: Path) -> None:
    small = ("--batch_size", "8", "--sequence_length", "32", "--steps", "12")
    found = {}
    for kind, flags in TOKENS.items():
        status, output = forks.run(HERE / "train_tokens.py", data, dict(os.environ), *flags, *small)
        assert status == 0 and output.startswith(f"{kind}: "), output
        found[kind] = output.partition(": ")[2]
    assert len(set(found.values())) == 1, "the same tokens, seed and order"
    loss, guessing = re.findall(r"loss ([\d.]+) \(guessing: ([\d.]+)\)", output)[0]
    assert float(loss) < 0.7 * float(guessing)


def test_images_of_all_formats_are_trained_on(forks: Runner, data: Path) -> None:
    found = {}
    for kind, path in IMAGES.items():
        epochs, workers = ("4", "1") if kind == "webdataset" else ("1", "0")
        flags = (path, "--epochs", epochs, "--batch_size", "8", "--num_workers", workers)
        status, output = forks.run(HERE / "train_images.py", data, dict(os.environ), *flags)
        assert status == 0 and output.startswith(f"{kind}: 240 images"), output
        found[kind] = output.partition(": ")[2]
    assert found["mds"] == found["lmdb"], "the same images in the same order"
    right = re.findall(r"(\d+) of 48 held-out", found["webdataset"])
    assert int(right[-1]) > 24, f"four classes: guessing is 12\n{found['webdataset']}"


def test_texts_of_a_hugging_face_directory_are_learnt(forks: Runner, data: Path) -> None:
    flags = ("reviews", "--epochs", "4", "--batch_size", "8", "--num_workers", "0")
    status, output = forks.run(HERE / "train_text.py", data, dict(os.environ), *flags)
    assert status == 0, output
    assert int(re.findall(r"(\d+) of 24 test texts", output)[-1]) > 15, f"guessing is 12\n{output}"


def test_two_runs_at_once_share_one_copy(forks: Runner, data: Path) -> None:
    flags = (*TOKENS["megatron"], "--steps", "1000000", "--batch_size", "1")
    runs = [forks.start(HERE / "train_tokens.py", data, dict(os.environ), *flags, "--seed", seed) for seed in "12"]
    try:
        for run in runs:
            assert "shared copy: " in run.stdout.readline()
        listed = json.loads(
            CliRunner().invoke(cli, ["cache", "list", str(data / "megatron/train.idx"), "--json"]).output
        )
        (entry,) = listed["entries"]
        assert {user["pid"] for user in entry["users"]} == {run.pid for run in runs}
    finally:
        for run in runs:
            os.kill(run.pid, signal.SIGKILL)
            run.wait()
            run.stdout.close()


@pytest.mark.parametrize(
    ("script", "flags", "said"),
    [
        ("train_tokens.py", ("nanogpt/train.bin", "--val", "nanogpt/val.bin"), "dtype='uint16'"),
        ("train_tokens.py", ("mds", "--val", "mds"), "needs a token file"),
        ("train_tokens.py", (*TOKENS["megatron"], "--sequence_length", "9999"), "shorter than one window"),
        ("train_tokens.py", (*TOKENS["megatron"], "--steps", "0"), "at least 1"),
        ("train_images.py", ("images/direction_0",), "no subdirectory for each class"),
        ("train_text.py", ("reviews", "--test", "validation"), "has no 'validation/text'"),
        ("make_data.py", ("--out", "mds/index.json"), "cannot write"),
    ],
)
def test_what_cannot_work_ends_in_an_error_message(
    forks: Runner, data: Path, script: str, flags: tuple[str, ...], said: str
) -> None:
    status, output = forks.run(HERE / script, data, dict(os.environ), *flags)
    assert status == 2 and said in output and "Traceback" not in output
