"""Files for launchers, read by the launchers' own readers; what ZeRO saves for a model at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml

from legroom.advice.zero_and_deepspeed import emit_training
from legroom.errors import UsageError
from legroom.integrations import deepspeed
from legroom.records.settings_and_overrides import Settings

JUDGE = Path(__file__).with_name("deepspeed_judge.py")
pytestmark = pytest.mark.timeout(900)  # one test waits for all files
SETTINGS = Settings(32, 2, 3, threads=4, pin_memory=False)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("offload", [False, True])
def test_deepspeeds_json(stage: int, offload: bool) -> None:
    config = json.loads(emit_training("deepspeed", SETTINGS, zero=stage, offload=offload))
    assert config == deepspeed.config(SETTINGS, stage=stage, offload=offload)
    # DeepSpeed refuses a file in which these do not multiply.
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 3 == 192
    assert config["train_batch_size"] == SETTINGS.effective_batch == 192
    zero = config["zero_optimization"]
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (offload, offload and stage == 3)
    assert all(not place["pin_memory"] for name, place in zero.items() if name.startswith("offload"))
    accelerate = pytest.importorskip("accelerate.utils.deepspeed")
    read = accelerate.HfDeepSpeedConfig(config)
    assert (read.is_zero2(), read.is_zero3(), read.is_offload()) == (stage == 2, stage == 3, offload)


@pytest.mark.parametrize(("stage", "kind"), [(None, "MULTI_GPU"), (2, "DEEPSPEED"), (3, "DEEPSPEED")])
def test_accelerates_yaml(stage: int | None, kind: str, tmp_path: Path) -> None:
    text = emit_training("accelerate", SETTINGS, zero=stage, offload=stage is not None, precision="no")
    assert "export OMP_NUM_THREADS=4" in text and "= 192 samples" in text
    config = yaml.safe_load(text)
    assert config["distributed_type"] == kind and config["num_processes"] == 3
    assert config["mixed_precision"] == "no"  # and not False, as YAML reads a bare no
    assert ("deepspeed_config" in config) == (stage is not None)
    args = pytest.importorskip("accelerate.commands.config.config_args")
    (tmp_path / "config.yaml").write_text(text)
    read = args.load_config_from_file(str(tmp_path / "config.yaml"))
    assert read.distributed_type == kind and read.num_processes == 3
    assert read.deepspeed_config.get("gradient_accumulation_steps", 2) == 2


def test_one_rank_needs_no_launcher_of_several() -> None:
    assert yaml.safe_load(emit_training("accelerate", Settings(32)))["distributed_type"] == "NO"


@pytest.mark.parametrize(
    ("kind", "options"),
    [("accelerate", {"offload": True}), ("deepspeed", {"zero": 1}), ("deepspeed", {"precision": "fp8"})],
)
def test_what_cannot_be_written_is_refused(kind: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        emit_training(kind, SETTINGS, **options)  # type: ignore[arg-type]


def test_parameters_are_counted_once_and_the_largest_layer_found() -> None:
    model = torch.nn.Sequential(torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 100, bias=False))
    model[2].weight = model[0].weight
    shape = deepspeed.shape_of(model, ranks=4)
    assert shape.params == 800 + 72 and shape.largest_layer == 800
    rows = deepspeed.savings(model, ranks=4)
    assert [row.stage for row in rows] == [0, 2, 2, 3, 3, 3] and not any(row.at_least for row in rows)


def every_file() -> dict[str, dict[str, Any]]:
    """Each file that can be written, for one rank and for two; ``train`` where it can be trained by without a GPU."""
    cases = {}
    for ranks, stage, offload, precision in product((1, 2), (None, 2, 3), (False, True), ("bf16", "fp16", "no")):
        settings = Settings(4, 2, ranks, threads=1, pin_memory=False)
        for kind in ("deepspeed", "accelerate"):
            if stage is None and (kind == "deepspeed" or offload):
                continue
            name = f"{kind}-{ranks}-zero{stage or 0}-{'offload' if offload else 'device'}-{precision}"
            text = emit_training(kind, settings, zero=stage, offload=offload, precision=precision)  # type: ignore[arg-type]
            # A CPU has no 16-bit floats of this kind, and accelerate would have DeepSpeed compile an Adam for offload.
            train = precision != "fp16" and not (kind == "accelerate" and offload)
            train = train and (ranks == 1 or precision == "bf16")  # two ranks take four times as long
            cases[name] = {
                "kind": kind, "text": text, "ranks": ranks, "batch": 4, "train": train,
                "means": understood(kind, ranks, stage, offload, precision, train),
            }  # fmt: skip
    return cases


def understood(
    kind: str, ranks: int, stage: int | None, offload: bool, precision: str, train: bool
) -> dict[str, object]:
    """What the file must be taken to mean."""
    means: dict[str, object] = {"precision": precision}
    if kind == "accelerate":
        means |= {"processes": ranks, "launcher": "deepspeed" if stage else "multi_gpu" if ranks > 1 else "simple"}
    if stage is None:
        return means
    means |= {"batch": 4, "accumulation": 2, "effective": 8 * ranks, "clipping": 1.0, "stage": stage}
    means |= {"optimizer": "cpu" if offload else "none", "weights": "cpu" if offload and stage == 3 else "none"}
    return means | ({"steps": 1} if train else {})


FILES = every_file()
REFUSED = "for three ranks, given to one"


@pytest.fixture(scope="module")
def judged() -> dict[str, list[Any]]:
    """All files at once: importing DeepSpeed takes seconds."""
    for package in ("deepspeed", "accelerate"):
        if find_spec(package) is None:
            pytest.skip(f"the package {package} is not installed")
    cases = [{"name": name} | case for name, case in FILES.items()]
    bad = {"kind": "deepspeed", "text": emit_training("deepspeed", SETTINGS), "ranks": 1, "train": False}
    done = subprocess.run(
        [sys.executable, JUDGE],
        input=json.dumps([*cases, {"name": REFUSED} | bad]),
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert not done.returncode, done.stderr[-4000:]
    found: dict[str, list[Any]] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", FILES)
def test_deepspeed_and_accelerate_take_the_file_and_train_by_it(name: str, judged: dict[str, list[Any]]) -> None:
    assert judged[name] == [FILES[name]["means"]] * FILES[name]["ranks"]


def test_deepspeed_refuses_a_file_for_other_ranks(judged: dict[str, list[Any]]) -> None:
    (said,) = judged[REFUSED]
    assert "192 != 32 * 2 * 1" in said


def test_arguments_of_wrong_types_are_refused() -> None:
    with pytest.raises(UsageError, match="settings must be"):
        deepspeed.config({})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="ranks must be an integer"):
        deepspeed.savings(torch.nn.Linear(2, 2), ranks="8")  # type: ignore[arg-type]
