"""torch's default collate, stacking straight into a slot.

Covers: tensors and arrays of equal shape, in workers; the error for unequal ones. Does not cover: what else a batch may
hold, which stays torch's business.

torch keeps a table of how each type of sample is put together, documented as the way to extend ``default_collate``.
In a worker its entry for tensors allocates in /dev/shm; this replaces that entry, in worker processes alone, so that it
also serves collate functions of people's own that call ``default_collate``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from legroom.errors import RaggedBatch
from legroom.loader.arena.pack import Writer, plain
from legroom.words import say

if TYPE_CHECKING:
    import torch

_writer: Writer | None = None  # of the batch that is being put together; a worker does one at a time


def stacking(writer: Writer | None) -> None:
    """Stack into this writer's slot from now on; None: no more."""
    global _writer
    _writer = writer


def install() -> None:
    """Put ours in the place of torch's entry; one that somebody else has put there stays."""
    import torch
    from torch.utils.data._utils.collate import collate_tensor_fn, default_collate_fn_map

    if default_collate_fn_map.get(torch.Tensor) is collate_tensor_fn:
        default_collate_fn_map[torch.Tensor] = _Stack(collate_tensor_fn)


class _Stack:
    def __init__(self, otherwise: Callable[..., Any]) -> None:
        self._otherwise = otherwise

    def __call__(self, batch: Sequence[torch.Tensor], *, collate_fn_map: Any = None) -> Any:
        import torch

        first = batch[0]
        if _writer is None or not plain(first) or first.requires_grad:
            return self._otherwise(batch, collate_fn_map=collate_fn_map)
        try:
            if type(first) is not torch.Tensor:  # a subclass decides for itself what its stack is
                return torch.stack(list(batch), 0)
            out = _writer.empty((len(batch), *first.shape), first.dtype)
            return torch.stack(list(batch), 0, out=out)
        except RuntimeError:
            shapes = sorted({tuple(sample.shape) for sample in batch})
            if len(shapes) < 2:
                raise
            raise RaggedBatch(
                say("the samples of a batch have different shapes and cannot be stacked"),
                why=say(
                    "{count} samples with {kinds} shapes: {shapes}",
                    count=len(batch), kinds=len(shapes), shapes=_some(shapes),
                ),
                fix=(
                    say("give a collate_fn that pads: torch.nn.utils.rnn.pad_sequence(samples, batch_first=True)"),
                    say("or bring the samples to one shape in the dataset"),
                ),
            ) from None  # fmt: skip


def _some(shapes: list[tuple[int, ...]]) -> str:
    shown = ", ".join(str(shape) for shape in shapes[:4])
    return shown + (", …" if len(shapes) > 4 else "")
