"""The same decision on every rank: minimum and maximum of a number over all ranks of torch.distributed.

torch.distributed is used only if the program has imported it and created a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from legroom.errors import RanksDisagree
from legroom.messages import say


class RankConsensus:
    """The ranks of torch's default process group, or this process alone."""

    def __init__(self, distributed: Any = None) -> None:
        module = sys.modules.get("torch.distributed") if distributed is None else distributed
        active = module is not None and module.is_available() and module.is_initialized()
        self._distributed = module if active else None
        self.world_size: int = module.get_world_size() if module is not None and active else 1

    def minimum(self, values: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks."""
        return self._reduce(values, "MIN")

    def maximum(self, values: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        return self._reduce(values, "MAX")

    def require_equal(self, **arguments: int) -> None:
        """Raise RanksDisagree unless every rank has the same values: later collectives would wait forever."""
        values = list(arguments.values())
        for name, low, high in zip(arguments, self.minimum(values), self.maximum(values), strict=True):
            if low != high:
                raise RanksDisagree(
                    say("ranks have different values of {name}", name=name),
                    why=say("from {low} to {high} over {world} ranks", low=low, high=high, world=self.world_size),
                    fix=(say("pass the same arguments on every rank"),),
                )  # fmt: skip

    def _reduce(self, values: Sequence[int], how: str) -> list[int]:
        if self._distributed is None or self.world_size == 1:
            return list(values)
        import torch

        # NCCL reduces tensors on the GPU only.
        device = "cuda" if self._distributed.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
        self._distributed.all_reduce(tensor, op=getattr(self._distributed.ReduceOp, how))
        return [int(value) for value in tensor.tolist()]
