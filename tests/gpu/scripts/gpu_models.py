"""Training steps for find_batch_size: a convolutional network, a transformer, and sequences of different lengths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn


def conv() -> Callable[[int], None]:
    torch.manual_seed(0)
    layers: list[Any] = []
    for before, after in ((3, 64), (64, 64), (64, 128), (128, 128)):
        layers += [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    model = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10)).cuda()
    return _step(model, lambda batch: torch.randn(batch, 3, 64, 64, device="cuda"))


def transformer() -> Callable[[int], None]:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True, dropout=0.0)
    model = nn.TransformerEncoder(layer, 4).cuda()
    return _step(model, lambda batch: torch.randn(batch, 128, 512, device="cuda"))


def ragged() -> Callable[..., None]:
    """Lengths differ from batch to batch; the second argument replaces them."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 256), nn.GELU(), nn.Linear(256, 8)).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    lengths = torch.Generator().manual_seed(1)

    def step(batch: int, length: int | None = None) -> None:
        width = length or int(torch.randint(16, 513, (1,), generator=lengths))
        optimizer.zero_grad(set_to_none=True)
        model(torch.randn(batch, width, 256, device="cuda")).square().mean().backward()
        optimizer.step()

    return step


def _step(model: Any, data: Callable[[int], Any]) -> Callable[[int], None]:
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(data(batch)).square().mean().backward()
        optimizer.step()

    step.model = model  # type: ignore[attr-defined]
    step.data = data  # type: ignore[attr-defined]
    return step


MODELS: dict[str, tuple[Callable[[], Callable[..., None]], int | None]] = {
    "conv": (conv, None),
    "transformer": (transformer, None),
    "ragged": (ragged, 512),
}
