"""The model of a training in the demo where there is no torch: a linear one, in numpy.

Covers: one step on a batch, its numbers out and in again. Does not cover: batches, checkpoints (training.py).
"""

from __future__ import annotations

from typing import Any

from legroom.demo.dataset import CLASSES, ROW_BYTES

FORMAT = "numpy"  # of the batches it takes


class Model:
    """Multinomial regression on the pixels, by SGD."""

    def __init__(self, seed: int, rate: float) -> None:
        import numpy as np

        random = np.random.default_rng(seed)
        self._weights = random.normal(0, 0.001, (ROW_BYTES, CLASSES)).astype(np.float32)
        self._rate = rate

    def step(self, batch: dict[str, Any]) -> float:
        """Learn from one batch; the loss on it."""
        import numpy as np

        images, labels = batch["images"], batch["labels"]
        count = len(labels)
        pixels = images.reshape(count, -1).astype(np.float32) / 255 - 0.5
        scores = pixels @ self._weights
        shares = np.exp(scores - scores.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        loss = float(-np.log(shares[np.arange(count), labels] + 1e-9).mean())
        shares[np.arange(count), labels] -= 1
        self._weights -= self._rate / count * (pixels.T @ shares)
        return loss

    def numbers(self) -> dict[str, Any]:
        """Its weights as arrays."""
        return {"weights": self._weights}

    def restore(self, numbers: dict[str, Any]) -> None:
        """Go on from these."""
        self._weights = numbers["weights"].copy()
