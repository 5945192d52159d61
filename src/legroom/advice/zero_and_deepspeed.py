"""Memory of each ZeRO stage, and settings as configuration files of DeepSpeed and accelerate."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Literal

from legroom.errors import UsageError
from legroom.messages import RANKS, SAMPLES, counted, listed, say
from legroom.records.settings_and_overrides import Settings
from legroom.system.argument_checks import check_choice, check_integer

Offload = Literal["none", "optimizer", "all"]
STAGES = (2, 3)
PLAIN = 16  # bytes per parameter in plain torch: weights 4, gradients 4, Adam 8; autocast keeps these too
_BUFFERS = 1.5  # DeepSpeed's additional_buffer_factor


@dataclass(frozen=True, slots=True)
class ZeroRow:
    """One stage: bytes on each GPU and on each node's host, and what that saves against plain torch."""

    stage: int  # 0: plain torch
    offload: Offload
    gpu: int
    host: int
    saves: int  # on each GPU; negative: it takes more
    formula: str  # of gpu: P parameters, N ranks, L parameters of the largest layer
    at_least: bool = False  # gpu does not include the largest layer, which is unknown


@dataclass(frozen=True, slots=True)
class Shape:
    """A model and the ranks that train it."""

    params: int
    ranks: int = 1
    nodes: int = 1
    largest_layer: int | None = None  # parameters; None: unknown, and stage 3 is a lower bound

    def __post_init__(self) -> None:
        for name, value in (("params", self.params), ("ranks", self.ranks), ("nodes", self.nodes)):
            object.__setattr__(self, name, check_integer(name, value, 1))
        _check_even(self.ranks, self.nodes)
        if self.largest_layer is not None and not 0 < self.largest_layer <= self.params:
            raise UsageError(
                say("the largest layer cannot have {count} parameters", count=self.largest_layer),
                why=say("the model has {count}", count=self.params),
                fix=(say("count only the module's own parameters, without submodules"),),
            )


def _check_even(ranks: int, nodes: int) -> None:
    if ranks % nodes:
        raise UsageError(
            say("{ranks} ranks cannot be split evenly over {nodes} nodes", ranks=ranks, nodes=nodes),
            fix=(say("use the same number of ranks on every node"),),
        )


def zero_rows(shape: Shape) -> tuple[ZeroRow, ...]:
    """Plain torch, then every stage and offload."""
    plain = ZeroRow(0, "none", PLAIN * shape.params, 0, 0, "16P")
    return (plain, *_stage_2(shape), *_stage_3(shape))


def _stage_2(shape: Shape) -> tuple[ZeroRow, ...]:
    count, ranks = shape.params, shape.ranks
    here = ranks // shape.nodes
    return (
        _row(shape, 2, "none", 2 * count + 18 * count // ranks, 4 * here * count, "2P + 18P/N"),
        _row(shape, 2, "optimizer", 2 * count, max(4 * ranks, 16) * count, "2P"),
    )


def _stage_3(shape: Shape) -> tuple[ZeroRow, ...]:
    count, ranks, nodes = shape.params, shape.ranks, shape.nodes
    layer = shape.largest_layer or 0
    building = 4 * (ranks // nodes) * (layer or count)
    return (
        _row(shape, 3, "none", 4 * layer + 18 * count // ranks, building, "4L + 18P/N"),
        _row(shape, 3, "optimizer", 4 * layer + 2 * count // ranks, 16 * count / nodes, "4L + 2P/N"),
        _row(shape, 3, "all", 4 * layer, 18 * count / nodes, "4L"),
    )


def _row(shape: Shape, stage: int, offload: Offload, gpu: int, host: float, formula: str) -> ZeroRow:
    unknown = stage == 3 and shape.largest_layer is None
    return ZeroRow(stage, offload, gpu, int(host * _BUFFERS), PLAIN * shape.params - gpu, formula, unknown)


Precision = Literal["bf16", "fp16", "no"]
PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "no")
CLIPPING = 1.0  # largest gradient norm: the default of DeepSpeed, accelerate and transformers


def emit_training(
    kind: str, settings: Settings, *, zero: int | None = None, offload: bool = False, precision: Precision = "bf16",
    nodes: int = 1,
) -> str:  # fmt: skip
    """The whole file. Without ``zero``, DeepSpeed's is stage 2 and accelerate's is plain data parallelism.

    ``nodes``: machines that the ranks are on, which accelerate's file has to say.
    """
    if offload and zero is None and kind == "accelerate":
        raise UsageError(
            say("offload needs a ZeRO stage"),
            why=say("plain data parallelism keeps everything on the GPU"),
            fix=(say("also pass zero=2 or zero=3"),),
        )
    if kind == "deepspeed":
        config = deepspeed_config(settings, stage=2 if zero is None else zero, offload=offload, precision=precision)
        return json.dumps(config, indent=2)
    config = accelerate_config(settings, stage=zero, offload=offload, precision=precision, nodes=nodes)
    return _yaml(config, settings)


def deepspeed_config(
    settings: Settings, *, stage: int = 2, offload: bool = False, precision: Precision = "bf16"
) -> dict[str, Any]:
    """The config for ``deepspeed.initialize(config=…)`` and TrainingArguments(deepspeed=…)."""
    _check(stage, precision)
    zero: dict[str, Any] = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True}
    # Pinned offload memory cannot be swapped: pin it only if tune chose pin_memory too.
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
    settings: Settings, *, stage: int | None = None, offload: bool = False, precision: Precision = "bf16",
    nodes: int = 1,
) -> dict[str, Any]:  # fmt: skip
    """The config for ``accelerate launch --config_file``."""
    _check(2 if stage is None else stage, precision)
    _check_even(settings.ranks, nodes)
    config: dict[str, Any] = {
        "compute_environment": "LOCAL_MACHINE",
        "distributed_type": "DEEPSPEED" if stage is not None else "MULTI_GPU" if settings.ranks > 1 else "NO",
        "num_machines": nodes,
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
        if nodes > 1:  # started on every machine, as without DeepSpeed; accelerate's default is pdsh
            config["deepspeed_config"]["deepspeed_multinode_launcher"] = "standard"
    return config


def _check(stage: int, precision: str) -> None:
    if stage not in STAGES:
        raise UsageError(
            say("ZeRO stage {stage} is not supported", stage=stage),
            why=say("stage 2 partitions gradients and optimizer states, stage 3 also the weights"),
            fix=(say("use one of: {kinds}", kinds=listed(map(str, STAGES))),),
        )
    check_choice("precision", precision, PRECISIONS)


def _yaml(config: dict[str, Any], settings: Settings) -> str:
    """Two levels of strings, numbers and booleans: no YAML library is needed."""
    where = " --machine_rank N --main_process_ip ADDRESS --main_process_port PORT" if config["num_machines"] > 1 else ""
    head = [
        f"# accelerate launch --config_file THIS_FILE{where} train.py",
        say(
            "# batch_size={batch} in each DataLoader, Accelerator(gradient_accumulation_steps={steps}): "
            "{batch} × {steps} × {ranks} = {samples} per optimizer step",
            batch=settings.batch_size, steps=settings.accumulation,
            ranks=counted(settings.ranks, *RANKS), samples=counted(settings.effective_batch, *SAMPLES),
        ),
        *(f"# export {name}={value}" for name, value in settings.environment().items()),
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
    # YAML 1.1 reads a bare NO, no or null as a boolean or null.
    return json.dumps(value)
