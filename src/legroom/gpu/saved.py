"""State that trials must not change: trials are real steps, and train.

Covers: weights, optimizer state and random numbers, put aside in host memory and put back.
Does not cover: anything without state_dict(), such as a data loader's position.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any


class Saved:
    """``with Saved([model, optimizer]):`` leaves both as they were."""

    def __init__(self, keep: Sequence[Any]) -> None:
        self._keep = list(keep)
        self._states: list[Any] = []
        self._random: Any = None

    def __enter__(self) -> Saved:
        if self._keep:
            import torch

            self._states = [_on_host(one.state_dict()) for one in self._keep]
            self._random = torch.get_rng_state()
        return self

    def __exit__(self, *_: object) -> None:
        if not self._keep:
            return
        import torch

        for one, state in zip(self._keep, self._states, strict=True):
            one.load_state_dict(state)
            if hasattr(one, "zero_grad"):
                one.zero_grad(set_to_none=True)
        torch.set_rng_state(self._random)
        self._states.clear()


def _on_host(value: Any) -> Any:
    """A copy with every tensor in host memory, so that putting it aside takes nothing of the card."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {key: _on_host(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_on_host(one) for one in value]
    return copy.deepcopy(value)
