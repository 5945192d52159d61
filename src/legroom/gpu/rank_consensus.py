"""Every rank of one training doing the same.

Covers: the smallest and the largest of a number over all ranks, and refusing ranks that were asked for different
things. Does not cover: who starts them, or gradients (survive.py).

torch.distributed is asked only where the program has imported it and made a process group.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from legroom.errors import RanksDisagree
from legroom.words import say


class RankConsensus:
    """The ranks of torch's default process group, or this process alone."""

    def __init__(self, distributed: Any = None) -> None:
        found = sys.modules.get("torch.distributed") if distributed is None else distributed
        alive = found is not None and found.is_available() and found.is_initialized()
        self._distributed = found if alive else None
        self.world: int = found.get_world_size() if found is not None and alive else 1

    def least(self, values: Sequence[int]) -> list[int]:
        """The smallest of each number over all ranks."""
        return self._reduce(values, "MIN")

    def most(self, values: Sequence[int]) -> list[int]:
        """The largest of each number over all ranks."""
        return self._reduce(values, "MAX")

    def agree(self, **asked: int) -> None:
        """Refuse to go on where ranks were asked for different things: they would wait for each other for ever."""
        names, values = list(asked), list(asked.values())
        for name, low, high in zip(names, self.least(values), self.most(values), strict=True):
            if low != high:
                raise RanksDisagree(
                    say("ranks were asked for different values of {name}", name=name),
                    why=say("from {low} to {high} over {world} ranks", low=low, high=high, world=self.world),
                    fix=(say("give every rank the same arguments"),),
                )

    def _reduce(self, values: Sequence[int], how: str) -> list[int]:
        if self._distributed is None or self.world == 1:
            return list(values)
        import torch

        # NCCL reduces what lies on a card, and nothing else.
        device = "cuda" if self._distributed.get_backend() == "nccl" else "cpu"
        tensor = torch.tensor(list(values), dtype=torch.int64, device=device)
        self._distributed.all_reduce(tensor, op=getattr(self._distributed.ReduceOp, how))
        return [int(value) for value in tensor.tolist()]
