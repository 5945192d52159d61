"""DeepSpeed's configuration from Legroom's settings, and what each stage of ZeRO would save for a model at hand.

Covers: ``config`` for ``deepspeed.initialize`` or TrainingArguments, ``savings`` for a torch model.
Does not cover: the sums (budget.zero). DeepSpeed itself is not needed for either.
"""

from __future__ import annotations

from typing import Any

from legroom.budget.emit_training import Precision, deepspeed_config
from legroom.budget.zero import Shape, ZeroRow, zero_rows
from legroom.model import Settings


def config(
    settings: Settings, *, stage: int = 2, offload: bool = False, precision: Precision = "bf16"
) -> dict[str, Any]:
    """What ``deepspeed.initialize(config=…)`` takes: batch, accumulation and effective batch as in the settings.

    Args:
        settings: What ``legroom.tune`` gave, or made by hand.
        stage: Of ZeRO, 2 or 3.
        offload: Keep the optimizer's state in host memory (with stage 3 the parameters, too).
        precision: ``"bf16"``, ``"fp16"`` or ``"no"``.
    """
    return deepspeed_config(settings, stage=stage, offload=offload, precision=precision)


def savings(model: Any, *, ranks: int, nodes: int = 1) -> tuple[ZeroRow, ...]:
    """Plain torch and every stage of ZeRO: bytes of this model's states on each GPU and each host.

    Args:
        model: A torch model; its parameters are counted, shared ones once.
        ranks: Processes that train together, one a GPU.
        nodes: Machines they run on.
    """
    return zero_rows(shape_of(model, ranks=ranks, nodes=nodes))


def shape_of(model: Any, *, ranks: int, nodes: int = 1) -> Shape:
    """The model's parameters, shared ones once, and those of its largest layer."""
    every = {id(parameter): parameter.numel() for parameter in model.parameters()}
    layers = (sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules())
    return Shape(sum(every.values()), ranks, nodes, max(layers, default=0) or None)
