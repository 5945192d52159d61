"""The music example dies bare in a 64 MB /dev/shm and finishes under `legroom run`, as its README says."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import rigs
from example_modules import EXAMPLES, modules

from legroom import messages

torch = pytest.importorskip("torch")
HERE = EXAMPLES / "audio_diffusion"
# One thread and no GPU: the training loop takes batches more slowly than its workers make them, on any machine.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONWARNINGS": "ignore"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("audio") / "clips.h5"
    command = [sys.executable, str(HERE / "make_data.py"), "--out", str(path)]
    subprocess.run(command, check=True, timeout=240, env={**os.environ, **ENVIRONMENT})
    return path


@pytest.fixture(scope="module")
def scripts() -> Iterator[dict[str, ModuleType]]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with modules("audio_diffusion") as found:
        yield found
    torch.set_num_threads(threads)


def _command(data: Path, *more: str) -> list[str]:
    settings = ["--global_batch_size", "32", "--num_workers", "4", "--accum_iter", "1", "--epochs", "2"]
    return [sys.executable, str(HERE / "train.py"), "--data", str(data), *settings, *more]


def _run(command: list[str], folder: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **ENVIRONMENT, "XDG_STATE_HOME": str(folder / "state")}
    command = rigs.small_shm(command)
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=folder, env=environment)


def _losses(text: str) -> dict[int, float]:
    return {int(epoch): float(loss) for epoch, loss in re.findall(r"epoch (\d+): .* loss ([\d.]+)", text)}


@pytest.mark.soak
@pytest.mark.real("mount")
def test_unsupervised_it_fails_when_the_clips_become_longer(data: Path, tmp_path: Path) -> None:
    done = _run(_command(data), tmp_path)
    assert done.returncode not in (0, 2), done.stderr
    assert list(_losses(done.stdout)) == [1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["checkpoint_latest.pt", "epoch001.pt"]


@pytest.mark.soak  # test_real_rescue.py and test_real_resume.py show the same with less
@pytest.mark.real("mount")
def test_it_is_rescued_with_the_losses_of_a_run_that_never_failed(data: Path, tmp_path: Path) -> None:
    asked = ["--retries", "4", "--stall", "15s", "--checkpoint", "checkpoints/*.pt", "--resume-flag", "--resume"]
    legroom = [sys.executable, "-m", "legroom", "run", "--report", "story", *asked, "--"]
    rescued = _run([*legroom, *_command(data)], tmp_path)
    assert rescued.returncode == 0, rescued.stderr
    story: dict[str, Any] = json.loads((tmp_path / "story.json").read_text())
    *dead, last = story["attempts"]
    assert dead and {attempt["verdict"] for attempt in dead} == {"shm-full"}
    kept = last["resumed_from"]  # two names of one file
    assert kept in ("checkpoints/epoch001.pt", "checkpoints/checkpoint_latest.pt")
    assert last["settings"]["batch"] * last["settings"]["accumulation"] == 32
    assert last["settings"]["workers"] < 4
    assert f"resumed from {kept}: epoch 1 is done" in rescued.stdout

    # Our loader needs no rescue: one attempt, all four workers.
    (tmp_path / "other").mkdir()
    swapped = _run(
        [sys.executable, "-m", "legroom", "run", "--loader", "legroom", "--", *_command(data)], tmp_path / "other"
    )
    assert swapped.returncode == 0, swapped.stderr
    assert _losses(rescued.stdout) == pytest.approx(_losses(swapped.stdout), rel=0.01)


def test_it_learns_and_accumulates(
    data: Path, tmp_path: Path, scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    """In this process, without workers: the loss falls, and the effective batch is the product of the two flags."""
    flags = [
        "--data",
        str(data),
        "--ckpt_dir",
        str(tmp_path),
        "--num_workers",
        "0",
        "--short_epochs",
        "2",
        "--epochs",
        "2",
    ]
    scripts["train"].main([*flags, "--global_batch_size", "8", "--accum_iter", "4"])
    said = capsys.readouterr().out
    assert "effective batch 8 × 4 = 32, steps per epoch: 12" in said
    losses = _losses(said)
    assert losses[2] < losses[1]


@pytest.mark.parametrize(("batch", "accumulation"), [(8, 64), (16, 32), (4, 128)])
def test_the_notes_command_lines_take_the_same_step(
    data: Path,
    tmp_path: Path,
    scripts: dict[str, ModuleType],
    capsys: pytest.CaptureFixture[str],
    batch: int,
    accumulation: int,
) -> None:
    """512 clips a step of which there are 384: one step of all of them, however it is split; then from its checkpoint."""
    assert scripts["train"].parser().get_default("accum_iter") == 16
    flags = ["--data", str(data), "--ckpt_dir", str(tmp_path), "--num_workers", "0", "--short_epochs", "2"]
    flags += ["--global_batch_size", str(batch), "--accum_iter", str(accumulation)]
    scripts["train"].main([*flags, "--epochs", "1"])
    first = capsys.readouterr().out
    assert "= 512, steps per epoch: 1" in first and "only 384 clips" in first
    # The noise of a step depends on how it is split, so the loss is near, not equal.
    assert _losses(first)[1] == pytest.approx(0.69, rel=0.1)
    scripts["train"].main([*flags, "--epochs", "2", "--resume", "checkpoint_latest.pt"])
    assert list(_losses(capsys.readouterr().out)) == [2]


# Trains as train.py does; then each rank leaves a checksum of its weights.
LEAVE_WEIGHTS = f"""
import os, pathlib, sys, zlib
sys.path.insert(0, {str(HERE)!r})
import train
made = []
class Flow(train.Flow):
    def __init__(self, *given, **named):
        super().__init__(*given, **named)
        made.append(self)
train.Flow = Flow
train.main()
(model,) = made
weights = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
pathlib.Path("weights-" + os.environ.get("RANK", "alone")).write_text(str(zlib.crc32(weights)))
"""


@pytest.mark.soak  # the ranks of test_real_batches_ddp.py step together, too
def test_two_ranks_train_as_one(data: Path, tmp_path: Path) -> None:
    """Under torchrun each rank takes its half of every batch; losses are those of one process, but for the noise."""
    (tmp_path / "program.py").write_text(LEAVE_WEIGHTS)
    program = [str(tmp_path / "program.py"), "--data", str(data), "--num_workers", "1", "--short_epochs", "2"]
    program += ["--epochs", "2", "--accum_iter", "2"]
    environment = {**os.environ, **ENVIRONMENT}
    shown = {}
    for name, start in {
        "two": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"],
        "one": [],
    }.items():
        folder = tmp_path / name
        folder.mkdir()
        done = subprocess.run(
            [sys.executable, *start, *program], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
        )
        assert done.returncode == 0, done.stderr
        assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == [
            "checkpoint_latest.pt",
            "epoch001.pt",
            "epoch002.pt",
        ]
        shown[name] = _losses(done.stdout)
    assert shown["two"].keys() == {1, 2}
    assert shown["two"] == pytest.approx(shown["one"], rel=0.05)
    # Without an exchange of gradients the losses are as near; the weights of two ranks are then two models.
    first, second = ((tmp_path / "two" / f"weights-{rank}").read_text() for rank in (0, 1))
    assert first == second != (tmp_path / "one" / "weights-alone").read_text()


def test_it_has_chinese_help(
    data: Path,
    tmp_path: Path,
    scripts: dict[str, ModuleType],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    messages.speak("zh")
    with pytest.raises(SystemExit):
        scripts["train"].main(["--help"])
    assert "梯度累积" in capsys.readouterr().out
    scripts["train"].main(["--data", str(data), "--ckpt_dir", str(tmp_path), "--num_workers", "0", "--epochs", "1"])
    assert "有效批大小 32 × 16 = 512" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--global_batch_size", "0"], "0 is not at least 1"),
        (["--accum_iter", "many"], "invalid positive value: 'many'"),
        (["--num_workers", "-1"], "--num_workers and --short_epochs must be at least 0"),
        (["--batch"], "unrecognized arguments: --batch"),
        (["--data", "nowhere.h5"], "unreadable-source"),
        (["--data", str(HERE / "train.py")], "unknown-format"),
        (["--resume", "nowhere.pt"], "cannot resume from nowhere.pt"),
        (["--resume", str(HERE / "README.md")], "cannot resume from"),
        (["--ckpt_dir", str(HERE / "README.md")], "cannot write checkpoints to"),
    ],
)
def test_bad_flags_and_missing_files(
    data: Path, scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], flags: list[str], said: str
) -> None:
    with pytest.raises(SystemExit) as ending:
        scripts["train"].main(["--data", str(data), *flags])
    assert ending.value.code == 2
    assert said in capsys.readouterr().err


def test_a_file_of_something_else(
    tmp_path: Path, scripts: dict[str, ModuleType], capsys: pytest.CaptureFixture[str]
) -> None:
    import h5py

    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = [1, 2, 3]
    with pytest.raises(SystemExit) as ending:
        scripts["train"].main(["--data", str(tmp_path / "other.h5")])
    assert ending.value.code == 2
    assert "has no captions, mels, text_whole, text_words" in capsys.readouterr().err
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file.create_dataset("mels", data=[[1, 2, 3]], compression="gzip")
    with pytest.raises(SystemExit) as ending:
        scripts["train"].main(["--data", str(tmp_path / "other.h5")])
    assert ending.value.code == 2
    said = capsys.readouterr().err
    assert "cannot be mapped in place" in said and "make_data.py" in said and "backing" not in said


@pytest.mark.parametrize("flags", [["--clips", "0"], ["--out", "/nowhere/clips.h5"]])
def test_data_that_cannot_be_made(flags: list[str], scripts: dict[str, ModuleType]) -> None:
    with pytest.raises(SystemExit) as ending:
        scripts["make_data"].main(flags)
    assert ending.value.code == 2
