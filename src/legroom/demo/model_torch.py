"""The model of a training in the demo: two convolutions and a line, in torch.

Covers: one step on a batch, its numbers out and in again. Does not cover: batches, checkpoints (training.py).
"""

from __future__ import annotations

from typing import Any

from legroom.demo.dataset import CLASSES, IMAGE

FORMAT = "torch"  # of the batches it takes


class Model:
    """Plain SGD, so that its weights are all of its state; by hand, because torch.optim brings its compiler along."""

    def __init__(self, seed: int, rate: float) -> None:
        import torch

        torch.set_num_threads(1)  # four trainings share the cores
        torch.manual_seed(seed)
        self._net = torch.nn.Sequential(
            torch.nn.Conv2d(IMAGE[0], 8, 5, stride=4),
            torch.nn.ReLU(),
            torch.nn.Conv2d(8, 16, 3, stride=2),
            torch.nn.ReLU(),
            torch.nn.Flatten(),
            torch.nn.LazyLinear(CLASSES),
        )
        self._net(torch.zeros(1, *IMAGE))
        self._rate = rate

    def step(self, batch: dict[str, Any]) -> float:
        """Learn from one batch; the loss on it."""
        import torch

        loss = torch.nn.functional.cross_entropy(
            self._net(batch["images"].float() / 255 - 0.5), batch["labels"]
        )
        self._net.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        with torch.no_grad():
            for weights in self._net.parameters():
                if weights.grad is not None:
                    weights.sub_(weights.grad, alpha=self._rate)
        return float(loss.detach())

    def numbers(self) -> dict[str, Any]:
        """Its weights as arrays."""
        return {name: value.numpy() for name, value in self._net.state_dict().items()}

    def restore(self, numbers: dict[str, Any]) -> None:
        """Go on from these."""
        import torch

        self._net.load_state_dict({name: torch.from_numpy(value) for name, value in numbers.items()})
