"""The chat example learns, goes on after a kill with the weights of one that was not, and divides its rows among ranks."""

from __future__ import annotations

import argparse
import base64
import importlib.util
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from example_modules import EXAMPLES
from freed_memory import return_freed_memory

import legroom
from legroom.units import format_size, parse_size

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


def script(name: str) -> ModuleType:
    """A script that imports no other of the example."""
    spec = importlib.util.spec_from_file_location(f"chat_t5_{name}", HERE / f"{name}.py")
    assert spec is not None and spec.loader is not None
    made = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


class Trainings:
    """A server that forks training runs."""

    def __init__(self, data: Path, environment: dict[str, str]) -> None:
        self.data, self.environment = data, environment
        self._process = subprocess.Popen(
            [sys.executable, str(PLAYER), "serve"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env=environment,
        )  # fmt: skip

    def run(self, folder: Path, *flags: str, die: str = "", data: bool = True, **environment: str) -> int:
        """How that training ended; what it said is in ``said`` of its folder."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {
            "flags": [*flags, *(self.files() if data else [])],
            "folder": str(folder),
            "die": die,
            "environment": environment,
        }
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def files(self) -> list[str]:
        return [f"--train_file={self.data / 'train.parquet'}", f"--validation_file={self.data / 'valid.parquet'}"]

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
    subprocess.run(made, check=True, timeout=240, capture_output=True)
    # Rows that can be told apart, in several groups: what make_data.py draws may occur twice.
    table = pq.read_table(folder / "data" / "train.parquet")
    named = [f"{number} {prompt}" for number, prompt in enumerate(table["prompt"].to_pylist())]
    pq.write_table(table.set_column(0, "prompt", pa.array(named)), folder / "data" / "train.parquet", row_group_size=40)
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


@pytest.mark.soak
def test_it_learns_and_reports_what_it_does(uninterrupted: dict[str, Path]) -> None:
    for name, folder in uninterrupted.items():
        said, told = (folder / "said").read_text(), losses(folder)
        assert list(told) == [(epoch, step) for epoch in (0, 1) for step in range(1, 9)]
        assert float(told[1, 8]) < float(told[0, 1]) - 0.5
        assert "128 rows, 0 left over, 8 steps per epoch" in said
        assert ("mode: low-memory" in said) == (name == "stream")
        assert "  effective batch: 16\n" in said
        for moment in ("at start", "after the model", "at step 0"):
            assert said.count(f"  memory {moment}: ") == 2
        assert re.search(r"epoch 1: loss [\d.]+, \d+ ms per step, [\d.]+ times the speed of the epoch before", said)
        assert len(re.findall(r"of the answers exactly right, BLEU", said)) == 2
        (log,) = (folder / "logs").glob("chat_trainer_low_mem_*.log")
        assert "epoch: 1, step: 8/8, loss: " in log.read_text()


@pytest.mark.soak
def test_host_memory_by_component_is_logged_as_it_is(uninterrupted: dict[str, Path]) -> None:
    count = script("zero_check").parameters(16, 1)
    for name, folder in uninterrupted.items():
        said = (folder / "said").read_text()
        lines = {
            moment: dict(re.findall(r"(\D+?) ([\d.]+ \w+)(?:, |$)", parts))
            for moment, parts in re.findall(r"^host memory (.+?): (.+); together ", said, re.M)
        }
        assert list(lines) == ["at start", "after the model", "in epoch 0", "in epoch 1"]
        assert lines["at start"]["model"] == "0 B"
        assert lines["after the model"]["model"] == format_size(4 * count)
        (states,) = re.findall(r"Adafactor's states (\S+ \S+) ", said)
        for moment in ("in epoch 0", "in epoch 1"):
            held = lines[moment]
            assert held["model"] == held["accumulation"] == format_size(4 * count), "a gradient for each weight"
            assert held["optimizer"] == states and held["workers"] == "0 B"
            assert parse_size(held["Arrow data"]) > 0 and parse_size(held["prefetch"]) > 0, name
            assert parse_size(held["rest"]) > 50 << 20, "Python and torch"


def test_each_component_is_counted_where_it_lies() -> None:
    """Memory that is added to one component appears in that one and not in the rest."""
    memory = script("host_memory")
    big = 64 << 20
    model = torch.nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    return_freed_memory()  # of earlier tests, which would go while this one measures
    before = memory.components(model, optimizer)
    assert before["rest"] is not None and before["model"] == 4
    model.weight.data = torch.ones(big // 4, 1)
    model.weight.grad = torch.ones(big // 4, 1)
    optimizer.step()  # momentum, as large
    model.register_buffer("tied", model.weight.detach(), persistent=False)
    table = pa.allocate_buffer(big)
    np.frombuffer(table, np.uint8)[:] = 1
    after = memory.components(model, optimizer, batch={"ids": torch.ones(big, dtype=torch.uint8)})
    for name in ("model", "optimizer", "accumulation", "prefetch"):
        assert after[name] == big, name
    assert after["data"] - before["data"] == big == len(table)
    assert abs(after["rest"] - before["rest"]) < big // 2, (before, after)


def test_a_mapped_copy_of_the_rows_is_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("LEGROOM_DIR", "LEGROOM_SHM"):
        (tmp_path / variable).mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(tmp_path / variable))
    memory = script("host_memory")
    pq.write_table(pa.table({"prompt": ["x" * 4096] * 4096}), tmp_path / "rows.parquet", use_dictionary=False)
    with legroom.open(tmp_path / "rows.parquet") as data:
        buffers = [one for chunk in data["table"].column("prompt").chunks for one in chunk.buffers() if one is not None]
        assert sum(int(np.frombuffer(one, np.uint8).sum(dtype=np.int64)) for one in buffers)  # reads every page
        assert memory.components()["data"] < 1 << 20, "it is not in Arrow's own memory"
        held = memory.components(entry=data.info)["data"]
        assert 16 << 20 <= held < 17 << 20


def test_workers_and_what_they_prefetch_are_components(trainings: Trainings, tmp_path: Path) -> None:
    flags = ["--epochs=1", "--num_workers=2", "--pin_memory=False", "--ultra_low_mem=False"]
    assert trainings.run(tmp_path, *SMALL, *flags) == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    held = re.search(r"host memory in epoch 0: .*, prefetch (\S+ \w+), .*, workers (\S+ \w+), rest", said)
    assert held is not None, said
    prefetched, workers = map(parse_size, held.groups())
    assert prefetched >= 4096, "slots are mapped in whole pages"
    assert workers > 1 << 20


def test_memory_that_cannot_be_read_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    memory = script("host_memory")
    monkeypatch.setattr(memory, "_pages", lambda *_: None)
    sizes = memory.components()
    assert sizes["rest"] is None and sizes["workers"] is None
    assert "rest unknown; together unknown" in memory.described("now", sizes)


@pytest.mark.soak
def test_the_log_in_chinese(trainings: Trainings, tmp_path: Path) -> None:
    assert trainings.run(tmp_path, *SMALL, *STREAM, "--epochs=1", LEGROOM_LANG="zh") == 0
    said = (tmp_path / "said").read_text()
    for words in ("共 128 行，剩余 0 行，每轮 8 步", "内存（第 0 轮）：模型 ", "，梯度累积 ", "的回答完全正确"):
        assert words in said, said
    assert trainings.run(tmp_path, *SMALL, *STREAM, "--is_keep_training=True", LEGROOM_LANG="zh") == 0
    assert "从 checkpoints/last.pt 断点续训：第 1 轮" in (tmp_path / "said").read_text()


OFFLOADING = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu", "pin_memory": False}},
    "bf16": {"enabled": "auto"},
}
LAUNCHED = {"ACCELERATE_USE_DEEPSPEED": "true"}
AUTO = {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "auto"}}}
OFFLOAD_WORDS = "offloads the optimizer to cpu, which would replace Adafactor with Adam"


@pytest.mark.parametrize(
    ("file", "environment", "said"),
    [
        (OFFLOADING, {}, f"zero.json {OFFLOAD_WORDS}"),
        (OFFLOADING, {"WORLD_SIZE": "3"}, "181,440 parameters and 3 ranks that takes about 4.15 MB of host memory"),
        (None, {**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": json.dumps(OFFLOADING)}, OFFLOAD_WORDS),
        (
            None,
            {
                **LAUNCHED,
                "ACCELERATE_DEEPSPEED_CONFIG_FILE": base64.urlsafe_b64encode(json.dumps(OFFLOADING).encode()).decode(),
            },
            OFFLOAD_WORDS,
        ),
        (None, {**LAUNCHED, "ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, OFFLOAD_WORDS),
        (AUTO, {"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE": "cpu"}, OFFLOAD_WORDS),
        ({"zero_optimization": {"stage": 2, "cpu_offload": True}}, {}, OFFLOAD_WORDS),
        ({"zero_optimization": {"stage": 3}}, {}, "asks for ZeRO stage 3"),
        (None, {**LAUNCHED, "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3"}, "asks for ZeRO stage 3"),
        ({"bf16": {"enabled": True}}, {}, 'it has no object "zero_optimization"'),
        ([1], {}, "is not a DeepSpeed configuration"),
        ("{", {}, "is not a DeepSpeed configuration"),
        (None, {**LAUNCHED, "ACCELERATE_DEEPSPEED_CONFIG_FILE": "nowhere.json"}, "is not a DeepSpeed configuration"),
        (None, {"ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4"}, "the launcher and the script accumulate differently"),
        (
            {"zero_optimization": {"stage": 2}, "train_batch_size": 192},
            {},
            "its train_batch_size is 192, and here it is 64",
        ),
    ],
)  # fmt: skip
def test_what_zero_cannot_do_is_refused_before_torch_is_imported(
    trainings: Trainings, tmp_path: Path, file: object, environment: dict[str, str], said: str
) -> None:
    flags = trainings.files()
    if file is not None:
        (tmp_path / "zero.json").write_text(file if isinstance(file, str) else json.dumps(file))
        flags.append("--deepspeed=zero.json")
    # Whatever imports one of these fails; DeepSpeed is only asked whether it is installed.
    code = (
        "import sys, types, importlib.machinery as m; deepspeed = types.ModuleType('deepspeed');"
        "deepspeed.__spec__ = m.ModuleSpec('deepspeed', None);"
        "sys.modules.update(torch=None, accelerate=None, transformers=None, deepspeed=deepspeed);"
        "import train_low_mem; train_low_mem.main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "train", *flags], cwd=tmp_path, capture_output=True, text=True, timeout=240,
        env={**trainings.environment, "PYTHONPATH": str(HERE), **environment},
    )  # fmt: skip
    assert done.returncode == 2 and said in done.stderr, done.stderr
    assert "Traceback" not in done.stderr and not (tmp_path / "logs").exists()


def test_a_file_that_zero_can_do_is_not_refused(trainings: Trainings, tmp_path: Path) -> None:
    check = script("zero_check")
    flags = argparse.Namespace(
        deepspeed=tmp_path / "zero.json", batch_size_per_gpu=32, gradient_accumulation_steps=2, width=64, layers=2
    )
    given = json.loads((HERE / "ds_config_zero2.json").read_text())
    plain = {**OFFLOADING, "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}}}
    for config in (given, plain, {**OFFLOADING, "zero_force_ds_cpu_optimizer": False}):
        flags.deepspeed.write_text(json.dumps(config))
        check.check_zero(flags, {"WORLD_SIZE": "3"})
    flags.deepspeed = None
    check.check_zero(flags, LAUNCHED)
    check.check_zero(flags, {})


@pytest.mark.soak
@pytest.mark.parametrize("way", ["stream", "shared"])
def test_killed_and_resumed_it_ends_with_the_same_weights(
    trainings: Trainings, uninterrupted: dict[str, Path], tmp_path: Path, way: str
) -> None:
    """Before, during and after a save, amid an epoch and at its end; the saves are of steps 3, 6, 8 | 3, 6, 8."""
    flags = [*SMALL, *(STREAM if way == "stream" else SHARED), "--is_keep_training=True"]
    lives = [
        ("1-before", "starts from scratch: there is no checkpoints/last.pt"),
        ("2-during", "starts from scratch: there is no checkpoints/last.pt"),
        ("2-after", "resumes from checkpoints/last.pt: epoch 0, step 3"),
        ("2-before", "resumes from checkpoints/last.pt: epoch 1, step 0"),
        ("", "resumes from checkpoints/last.pt: epoch 1, step 3"),
    ]
    for die, said in lives:
        assert trainings.run(tmp_path, *flags, die=die) == (KILLED if die else 0)
        assert said in (tmp_path / "said").read_text()
    assert weights(tmp_path) == weights(uninterrupted[way])
    whole = losses(uninterrupted[way])
    assert losses(tmp_path) == {place: loss for place, loss in whole.items() if place > (1, 3)}


@pytest.mark.soak
def test_it_resumes_with_smaller_batches_at_the_same_row(
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


@pytest.mark.soak
def test_left_to_itself_it_chooses(trainings: Trainings, tmp_path: Path) -> None:
    assert trainings.run(tmp_path, *SMALL, "--epochs=1") == 0, (tmp_path / "said").read_text()
    said = (tmp_path / "said").read_text()
    assert "mode: normal" in said and "low_memory off: 128 samples × " in said
    assert "accumulation 2: 8 × 2 × 1 ranks = 16 samples per optimizer step, unchanged" in said
    assert trainings.run(tmp_path, "ask", "what colour is snow?", "what comes after one?", data=False) == 0
    assert len((tmp_path / "said").read_text().splitlines()) == 2


@pytest.mark.soak
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
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=tmp_path, env=trainings.environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("  effective batch: 32\n") == 2
    wanted = Counter(pq.read_table(trainings.data / "train.parquet")["prompt"].to_pylist())
    for way in (0, 1):
        ranks = [json.loads((tmp_path / f"{way}-{rank}.json").read_text()) for rank in (0, 1)]
        assert [len(rows) for rows in ranks] == [ROWS // 2] * 2
        assert Counter(ranks[0] + ranks[1]) == wanted


@pytest.mark.soak
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
        ([], "required: command"),
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
        ([*SMALL, *STREAM, keep, f"--ckpt_dir={tmp_path / 'torn'}"], "cannot load the checkpoint"),
        ([*SMALL, *STREAM, keep, theirs, "--width=32"], "is not a checkpoint of this model"),
        ([*SMALL, *STREAM, keep, theirs, "--seed=4"], "was saved with other settings"),
        (["ask", "what?", "--model_dir=nowhere"], "there is no model in nowhere"),
    ]  # fmt: skip
    for flags, said in bad:
        ours = [
            one for one in trainings.files() if one.partition("=")[0] not in {flag.partition("=")[0] for flag in flags}
        ]
        status = trainings.run(tmp_path, *flags, *(ours if flags[:1] == ["train"] else []), data=False)
        words = (tmp_path / "said").read_text()
        assert (status, "Traceback" in words) == (2, False), (flags, words)
        assert said in words, (flags, words)


def test_the_files_for_zero_are_what_tune_writes() -> None:
    from legroom.advice.zero_and_deepspeed import emit_training
    from legroom.records.settings_and_overrides import Settings

    settings = Settings(batch_size=32, accumulation=2, ranks=3, threads=1)
    assert (HERE / "ds_config_zero2.json").read_text() == emit_training("deepspeed", settings, zero=2) + "\n"
    written = emit_training("accelerate", settings, zero=2) + "\n"
    assert (HERE / "accelerate_config_deepspeed.yaml").read_text() == written
