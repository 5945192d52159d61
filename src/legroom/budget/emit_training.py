"""Settings as the configuration files of DeepSpeed and accelerate.

Covers: DeepSpeed's JSON for ZeRO 2 and 3 with and without offload, accelerate's YAML with and without DeepSpeed.
Does not cover: the choice of the settings (choose.py), what a stage saves (zero.py).

Pure. Every number is written out, so that a file says what will run: batch, accumulation and ranks multiply to the
effective batch, which DeepSpeed checks at its start.
"""

from __future__ import annotations

import json
from typing import Any, Literal

from legroom.budget.zero import STAGES
from legroom.errors import UsageError
from legroom.model import Settings
from legroom.system.argument_checks import check_choice
from legroom.words import listed, say

Precision = Literal["bf16", "fp16", "no"]
KINDS = ("deepspeed", "accelerate")
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "no")
CLIPPING = 1.0  # norm of the gradients at most: what DeepSpeed, accelerate and transformers take where a file is silent


def emit_training(
    kind: str,
    settings: Settings,
    *,
    zero: int | None = None,
    offload: bool = False,
    precision: Precision = "bf16",
) -> str:
    """The whole file. Without ``zero``, DeepSpeed's is stage 2 and accelerate's is plain data parallelism."""
    if kind not in KINDS:
        raise UsageError(
            say("nothing can be written for {kind!r}", kind=kind),
            fix=(say("give one of: {kinds}", kinds=listed(KINDS)),),
        )
    if offload and zero is None and kind == "accelerate":
        raise UsageError(
            say("offload needs a stage of ZeRO"),
            why=say("plain data parallelism keeps everything on the GPU"),
            fix=(say("give --zero 2 or --zero 3 with it"),),
        )
    if kind == "deepspeed":
        config = deepspeed_config(
            settings, stage=2 if zero is None else zero, offload=offload, precision=precision
        )
        return json.dumps(config, indent=2)
    return _yaml(accelerate_config(settings, stage=zero, offload=offload, precision=precision), settings)


def deepspeed_config(
    settings: Settings, *, stage: int = 2, offload: bool = False, precision: Precision = "bf16"
) -> dict[str, Any]:
    """What ``deepspeed.initialize(config=…)`` and TrainingArguments(deepspeed=…) take."""
    _check(stage, precision)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    # What is offloaded may be pinned, and is then host memory that cannot be swapped: only where tune pinned too.
    place = {"device": "cpu", "pin_memory": settings.pin_memory}
    if offload:
        zero["offload_optimizer"] = dict(place)
    if offload and stage == 3:
        zero["offload_param"] = dict(place)
    if stage == 3:
        zero["stage3_gather_16bit_weights_on_model_save"] = True
    config: dict[str, Any] = {
        "train_batch_size": settings.effective_batch,
        "train_micro_batch_size_per_gpu": settings.batch_size,
        "gradient_accumulation_steps": settings.accumulation,
        "gradient_clipping": CLIPPING,
        "zero_optimization": zero,
    }
    if precision != "no":
        config[precision] = {"enabled": True}
    return config


def accelerate_config(
    settings: Settings, *, stage: int | None = None, offload: bool = False, precision: Precision = "bf16"
) -> dict[str, Any]:
    """What ``accelerate launch --config_file`` reads."""
    _check(2 if stage is None else stage, precision)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if stage is not None else "MULTI_GPU" if settings.ranks > 1 else "NO",
        "num_machines": 1,
        "num_processes": settings.ranks,
        "machine_rank": 0,
        "main_training_function": "main",
        "mixed_precision": precision,
        "use_cpu": False,
    }
    if stage is not None:
        config["deepspeed_config"] = {
            "zero_stage": stage,
            "gradient_accumulation_steps": settings.accumulation,
            "gradient_clipping": CLIPPING,
            "offload_optimizer_device": "cpu" if offload else "none",
            "offload_param_device": "cpu" if offload and stage == 3 else "none",
            "zero3_init_flag": stage == 3,
            "zero3_save_16bit_model": stage == 3,
        }
    return config


def _check(stage: int, precision: str) -> None:
    if stage not in STAGES:
        raise UsageError(
            say("ZeRO stage {stage} is not written", stage=stage),
            why=say("stage 2 divides gradients and optimizer states, stage 3 the weights too"),
            fix=(say("give one of: {stages}", stages=listed(map(str, STAGES))),),
        )
    check_choice("precision", precision, PRECISIONS)


def _yaml(config: dict[str, Any], settings: Settings) -> str:
    """Two levels of words, numbers and switches: no library is needed to write them."""
    head = [
        say("# accelerate launch --config_file THIS_FILE train.py"),
        say(
            "# batch_size={batch} in each DataLoader, Accelerator(gradient_accumulation_steps={steps}): "
            "{batch} × {steps} × {ranks} ranks = {effective} samples an optimizer step",
            batch=settings.batch_size, steps=settings.accumulation, ranks=settings.ranks,
            effective=settings.effective_batch,
        ),
        *(say("# export {name}={value}", name=name, value=value) for name, value in settings.environment().items()),
    ]  # fmt: skip
    lines: list[str] = []
    for name, value in config.items():
        if isinstance(value, dict):
            lines.append(f"{name}:")
            lines += [f"  {inner}: {_scalar(each)}" for inner, each in value.items()]
        else:
            lines.append(f"{name}: {_scalar(value)}")
    return "\n".join([*head, *lines])


def _scalar(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    # YAML 1.1 reads a bare NO, no or none-like word as something else than text.
    return json.dumps(value)
