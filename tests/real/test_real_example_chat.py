"""The chat example learns, goes on after a kill with the weights of one that was not, and divides its rows among ranks."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
from example_modules import EXAMPLES

torch = pytest.importorskip("torch")
pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

for needed in ("transformers", "accelerate"):  # by the trainings: importing them here would take seconds
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"{needed} is not installed", allow_module_level=True)

HERE = EXAMPLES / "chat_t5"
PLAYER = Path(__file__).with_name("chat_t5_player.py")
KILLED = -9
# 8 rows to a batch, 2 batches to a step, 8 steps an epoch; a save every third step and one at the end of an epoch.
SMALL = ["train", "--batch_size_per_gpu=8", "--gradient_accumulation_steps=2", "--epochs=2", "--width=16", "--layers=1",
         "--eval_rows=8", "--max_seq_len=24", "--save_steps=3", "--warmup_steps=2", "--logging_steps=1", "--seed=3"]  # fmt: skip
BY_HAND = ["--num_workers=0", "--pin_memory=False"]
STREAM, SHARED = [*BY_HAND, "--ultra_low_mem=True"], [*BY_HAND, "--ultra_low_mem=False"]
ROWS = 128
pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="trainings are forked")


class Trainings:
    """A server of trainings."""

    def __init__(self, data: Path, environment: dict[str, str]) -> None:
        self.data, self.environment = data, environment
        self._process = subprocess.Popen(
            [sys.executable, str(PLAYER), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def run(self, folder: Path, *flags: str, die: str = "", data: bool = True) -> int:
        """How that training ended; what it said is in ``said`` of its folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"flags": [*flags, *(self.files() if data else [])], "folder": str(folder), "die": die}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def files(self) -> list[str]:
        return [
            f"--train_file={self.data / 'train.parquet'}",
            f"--validation_file={self.data / 'valid.parquet'}",
        ]

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("chat")
    for variable in ("LEGROOM_DIR", "LEGROOM_SHM"):
        (folder / variable).mkdir(mode=0o700)
    environment = {
        **os.environ, "LEGROOM_DIR": str(folder / "LEGROOM_DIR"), "LEGROOM_SHM": str(folder / "LEGROOM_SHM"),
        "XDG_STATE_HOME": str(folder), "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "LANG": "C", "LC_ALL": "C",
    }  # fmt: skip
    for name in ("SLURM_PROCID", "RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    made = [sys.executable, str(HERE / "make_data.py"), "--out", str(folder / "data"), "--rows", str(ROWS)]
    subprocess.run(made, check=True, timeout=120, capture_output=True)
    # Rows that can be told apart, in several groups: what make_data.py draws may occur twice.
    table = pq.read_table(folder / "data" / "train.parquet")
    named = [f"{number} {prompt}" for number, prompt in enumerate(table["prompt"].to_pylist())]
    pq.write_table(
        table.set_column(0, "prompt", pa.array(named)), folder / "data" / "train.parquet", row_group_size=40
    )
    server = Trainings(folder / "data", environment)
    yield server
    server.close()


def weights(folder: Path) -> bytes:
    return (folder / "chat_t5_model" / "model.safetensors").read_bytes()


def losses(folder: Path) -> dict[tuple[int, int], str]:
    said = (folder / "said").read_text()
    return {
        (int(epoch), int(step)): loss
        for epoch, step, loss in re.findall(r"epoch: (\d+), step: (\d+)/\d+, loss: (\S+)", said)
    }


@pytest.fixture(scope="module")
def uninterrupted(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name, way in (("stream", STREAM), ("shared", SHARED)):
        found[name] = tmp_path_factory.mktemp(name)
        assert trainings.run(found[name], *SMALL, *way) == 0, (found[name] / "said").read_text()
    return found


def test_it_learns_and_says_what_it_does(uninterrupted: dict[str, Path]) -> None:
    for name, folder in uninterrupted.items():
        said, told = (folder / "said").read_text(), losses(folder)
        assert list(told) == [(epoch, step) for epoch in (0, 1) for step in range(1, 9)]
        assert float(told[1, 8]) < float(told[0, 1]) - 0.5
        assert "128 rows, 0 left over, 8 steps an epoch" in said
        assert ("mode: low-memory" in said) == (name == "stream")
        assert "  effective batch: 16\n" in said
        for moment in ("at start", "after the model", "at step 0"):
            assert said.count(f"  memory {moment}: ") == 2
        assert re.search(r"epoch 1: loss [\d.]+, \d+ ms a step, [\d.]+ times the speed of before", said)
        assert len(re.findall(r"of the answers exactly right, BLEU", said)) == 2
        (log,) = (folder / "logs").glob("chat_trainer_low_mem_*.log")
        assert "epoch: 1, step: 8/8, loss: " in log.read_text()


@pytest.mark.parametrize("way", ["stream", "shared"])
def test_killed_and_resumed_it_ends_with_the_same_weights(
    trainings: Trainings, uninterrupted: dict[str, Path], tmp_path: Path, way: str
) -> None:
    """Before, during and after a save, amid an epoch and at its end; the saves are of steps 3, 6, 8 | 3, 6, 8."""
    flags = [*SMALL, *(STREAM if way == "stream" else SHARED), "--is_keep_training=True"]
    lives = [
        ("1-before", "begins anew: there is no checkpoints/last.pt"),
        ("2-during", "begins anew: there is no checkpoints/last.pt"),
        ("2-after", "goes on from checkpoints/last.pt: epoch 0, step 3"),
        ("2-before", "goes on from checkpoints/last.pt: epoch 1, step 0"),
        ("", "goes on from checkpoints/last.pt: epoch 1, step 3"),
    ]
    for die, said in lives:
        assert trainings.run(tmp_path, *flags, die=die) == (KILLED if die else 0)
        assert said in (tmp_path / "said").read_text()
    assert weights(tmp_path) == weights(uninterrupted[way])
    whole = losses(uninterrupted[way])
    assert losses(tmp_path) == {place: loss for place, loss in whole.items() if place > (1, 3)}


def test_it_goes_on_with_smaller_batches_at_the_same_row(
    trainings: Trainings, uninterrupted: dict[str, Path], tmp_path: Path
) -> None:
    """As a rescue does it: half the batch, twice the accumulation, and low-memory data from the next epoch on."""
    assert trainings.run(tmp_path, *SMALL, *SHARED, die="1-after") == KILLED
    smaller = ["--batch_size_per_gpu=4", "--gradient_accumulation_steps=4", "--is_keep_training=True"]
    assert trainings.run(tmp_path, *SMALL, *STREAM, *smaller) == 0
    said = (tmp_path / "said").read_text()
    assert "low_memory off: as this epoch began; the next is free" in said
    assert said.index("low_memory off: as this epoch began") < said.index("mode: low-memory")
    whole, rest = losses(uninterrupted["shared"]), losses(tmp_path)
    assert list(rest) == [place for place in whole if place > (0, 3)]
    # The same rows, averaged in other portions: nearly the same loss while the order is the same.
    assert float(rest[0, 4]) == pytest.approx(float(whole[0, 4]), rel=0.02)


def test_left_to_itself_it_chooses(trainings: Trainings, tmp_path: Path) -> None:
    assert trainings.run(tmp_path, *SMALL, "--epochs=1") == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "mode: normal" in said and "low_memory off: 128 samples of " in said
    assert "accumulation 2: 8 × 2 × 1 ranks = 16 samples an optimizer step, kept" in said
    assert trainings.run(tmp_path, "ask", "what colour is snow?", "what comes after one?", data=False) == 0
    assert len((tmp_path / "said").read_text().splitlines()) == 2


def test_two_ranks_see_every_row_exactly_once(trainings: Trainings, tmp_path: Path) -> None:
    flags = [*SMALL, *trainings.files(), "--epochs=1", "--save_steps=2"]
    launch = [
        sys.executable,
        "-m",
        "accelerate.commands.launch",
        "--multi_gpu",
        "--num_processes=2",
        "--main_process_port=0",
    ]
    command = [*launch, str(PLAYER), "seen", str(tmp_path), *flags, *STREAM, "--", *flags, *SHARED]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=trainings.environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  effective batch: 32\n") == 2
    wanted = Counter(pq.read_table(trainings.data / "train.parquet")["prompt"].to_pylist())
    for way in (0, 1):
        ranks = [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for rank in (0, 1)]
        assert [len(rows) for rows in ranks] == [ROWS // 2] * 2
        assert Counter(ranks[0] + ranks[1]) == wanted


def test_bad_flags_and_files(trainings: Trainings, uninterrupted: dict[str, Path], tmp_path: Path) -> None:
    empty, other, broken = (tmp_path / name for name in ("empty.parquet", "other.parquet", "broken.parquet"))
    texts = pa.schema([("prompt", pa.string()), ("response", pa.string())])
    pq.write_table(texts.empty_table(), empty)
    pq.write_table(pa.table({"prompt": [1], "response": [2]}), other)
    broken.write_bytes((trainings.data / "train.parquet").read_bytes()[:-100])
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "last.pt").write_bytes(
        (uninterrupted["stream"] / "checkpoints" / "last.pt").read_bytes()[:-500]
    )
    theirs = f"--ckpt_dir={uninterrupted['stream'] / 'checkpoints'}"
    keep = "--is_keep_training=True"
    bad = [
        ([], "required: verb"),
        (["train", "--batch"], "unrecognized arguments: --batch"),
        (["train", "--is_keep_training=perhaps"], "'perhaps' is neither True nor False"),
        (["train", "--batch_size_per_gpu=0"], "0 is not at least 1"),
        (["train", "--num_workers=-1"], "--num_workers, --warmup_steps and --seed must be at least 0"),
        (["train", "--width=18"], "--width must be a multiple of 4"),
        (["train", "--learn_rate=0"], "--learn_rate must be above 0"),
        (["train", "--train_file=nowhere.parquet"], "there is no file nowhere.parquet (make_data.py makes the data)"),
        (["train", f"--ckpt_dir={empty}"], f"cannot write to {empty}"),
        (["train", "--batch_size_per_gpu=512"], "it has 128 rows, and a step takes 1024"),
        (["train", "--stream_memory=little"], "bad-size"),
        (["train", f"--train_file={empty}"], "it has 0 rows, and a step takes 64"),
        (["train", f"--train_file={other}"], "column prompt of"),
        (["train", f"--train_file={broken}"], "damaged-source"),
        (["train", f"--train_file={HERE / 'README.md'}"], "unknown-format"),
        (["train", f"--validation_file={other}"], "column prompt of"),
        (["train", f"--deepspeed={HERE / 'ds_config_zero2.json'}"], "missing-package"),
        ([*SMALL, *STREAM, keep, f"--ckpt_dir={tmp_path / 'torn'}"], "cannot be read as a checkpoint"),
        ([*SMALL, *STREAM, keep, theirs, "--width=32"], "is no checkpoint of this training"),
        ([*SMALL, *STREAM, keep, theirs, "--seed=4"], "was made with other settings"),
        (["ask", "what?", "--model_dir=nowhere"], "there is no model in nowhere"),
    ]  # fmt: skip
    for flags, said in bad:
        ours = [
            one
            for one in trainings.files()
            if one.partition("=")[0] not in {flag.partition("=")[0] for flag in flags}
        ]
        status = trainings.run(tmp_path, *flags, *(ours if flags[:1] == ["train"] else []), data=False)
        words = (tmp_path / "said").read_text()
        assert (status, "Traceback" in words) == (2, False), (flags, words)
        assert said in words, (flags, words)


def test_the_files_for_zero_are_what_tune_writes() -> None:
    from legroom.budget.emit_training import emit_training
    from legroom.model import Settings

    settings = Settings(batch_size=32, accumulation=2, ranks=3, threads=1)
    assert (HERE / "ds_config_zero2.json").read_text() == emit_training("deepspeed", settings, zero=2) + "\n"
    written = emit_training("accelerate", settings, zero=2) + "\n"
    assert (HERE / "accelerate_config_deepspeed.yaml").read_text() == written
