"""What the stages of ZeRO would save for a model: weights, gradients and optimizer states, for each GPU and node.

Covers: the sums that DeepSpeed's own estimators use for stages 2 and 3 with 16-bit weights and Adam, with and without
offload. Does not cover: activations, buffers and fragments, which ZeRO leaves as they are; other optimizers.

Pure. Bytes a parameter, as DeepSpeed keeps them:

    2   weights in 16 bit      whole on every GPU in stage 2, divided among the ranks in stage 3
    18  2 gradients in 16 bit, 4 gradients, 4 weights and 8 Adam moments in 32 bit: divided among the ranks

Stage 3 gathers one layer at a time: 4 bytes for each parameter of the largest. On the host, what is offloaded, or what
building the model takes, times 1.5 for buffers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from legroom.errors import UsageError
from legroom.system.argument_checks import check_integer
from legroom.words import say

Offload = Literal["none", "optimizer", "all"]
STAGES = (2, 3)
PLAIN = 16  # bytes a parameter in plain torch: weights 4, gradients 4, Adam 8; autocast keeps these too
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
    at_least: bool = False  # gpu leaves out the largest layer, which is unknown


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
        if self.ranks % self.nodes:
            raise UsageError(
                say("{ranks} ranks do not divide among {nodes} nodes", ranks=self.ranks, nodes=self.nodes),
                fix=(say("give as many ranks on every node"),),
            )
        if self.largest_layer is not None and not 0 < self.largest_layer <= self.params:
            raise UsageError(
                say("the largest layer cannot have {count} parameters", count=self.largest_layer),
                why=say("the model has {count}", count=self.params),
                fix=(say("count the parameters that one module holds itself"),),
            )


def zero_rows(shape: Shape) -> tuple[ZeroRow, ...]:
    """Plain torch, then every stage and offload."""
    plain = ZeroRow(0, "none", PLAIN * shape.params, 0, 0, "16P")
    return (plain, *_stage_2(shape), *_stage_3(shape))


def zero_row(shape: Shape, stage: int, offload: bool) -> ZeroRow:
    """The row of one configuration, as emit_training writes it: offload takes with it all that a stage can."""
    wanted: Offload = "none" if not offload else "optimizer" if stage == 2 else "all"
    return next(row for row in zero_rows(shape) if row.stage == stage and row.offload == wanted)


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
