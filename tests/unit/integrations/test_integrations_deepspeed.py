"""Files for launchers, read by the launchers' own readers; what ZeRO saves for a model at hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml

from legroom.budget.emit_training import emit_training
from legroom.errors import UsageError
from legroom.integrations import deepspeed
from legroom.model import Settings

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
    [("slurm", {}), ("accelerate", {"offload": True}), ("deepspeed", {"zero": 1}), ("deepspeed", {"precision": "fp8"})],
)  # fmt: skip
def test_what_cannot_be_written_is_refused(kind: str, options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        emit_training(kind, SETTINGS, **options)  # type: ignore[arg-type]


def test_parameters_are_counted_once_and_the_largest_layer_found() -> None:
    model = torch.nn.Sequential(
        torch.nn.Embedding(100, 8), torch.nn.Linear(8, 8), torch.nn.Linear(8, 100, bias=False)
    )
    model[2].weight = model[0].weight
    shape = deepspeed.shape_of(model, ranks=4)
    assert shape.params == 800 + 72 and shape.largest_layer == 800
    rows = deepspeed.savings(model, ranks=4)
    assert [row.stage for row in rows] == [0, 2, 2, 3, 3, 3] and not any(row.at_least for row in rows)
