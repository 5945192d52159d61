"""A DeepSpeed configuration from Legroom's settings, and how much memory each ZeRO stage saves for a model.

``config`` is for ``deepspeed.initialize`` or TrainingArguments, ``savings`` for a torch model. DeepSpeed itself is not
needed for either.
"""

from __future__ import annotations

from typing import Any

from legroom.advice.zero_and_deepspeed import Precision, Shape, ZeroRow, deepspeed_config, zero_rows
from legroom.records.settings_and_overrides import Settings
from legroom.system.argument_checks import check_arguments


def config(
    settings: Settings, *, stage: int = 2, offload: bool = False, precision: Precision = "bf16"
) -> dict[str, Any]:
    """A configuration for ``deepspeed.initialize(config=…)`` with the batch and accumulation of the settings.

    Args:
        settings: The result of ``legroom.tune``, or your own.
        stage: The ZeRO stage, 2 or 3.
        offload: Keep the optimizer's state in host memory (with stage 3 also the parameters).
        precision: ``"bf16"``, ``"fp16"`` or ``"no"``.
    """
    check_arguments(config, locals())
    return deepspeed_config(settings, stage=stage, offload=offload, precision=precision)


def savings(model: Any, *, ranks: int, nodes: int = 1) -> tuple[ZeroRow, ...]:
    """Bytes of this model's states on each GPU and each host, for plain torch and every ZeRO stage.

    Args:
        model: A torch model; its parameters are counted, shared ones once.
        ranks: Processes that train together, one per GPU.
        nodes: Machines they run on.
    """
    check_arguments(savings, locals())
    return zero_rows(shape_of(model, ranks=ranks, nodes=nodes))


def shape_of(model: Any, *, ranks: int, nodes: int = 1) -> Shape:
    """The number of the model's parameters, shared ones once, and of its largest layer."""
    every = {id(parameter): parameter.numel() for parameter in model.parameters()}
    layers = (sum(one.numel() for one in module.parameters(recurse=False)) for module in model.modules())
    return Shape(sum(every.values()), ranks, nodes, max(layers, default=0) or None)
