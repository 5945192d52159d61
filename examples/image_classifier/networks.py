"""The two models: a small convolutional classifier, and a transformer on the features it has learned."""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn

FEATURES = 64  # numbers a place
STRIDE = 16  # pixels of the image from place to place


def encoder() -> nn.Sequential:
    """From (3, size, size) to (FEATURES, size / STRIDE, size / STRIDE)."""
    widths = (3, 16, 32, 64, FEATURES)
    layers: list[nn.Module] = []
    for before, after in pairwise(widths):
        layers += [nn.Conv2d(before, after, 3, stride=2, padding=1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers)


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.encoder = encoder()
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.encoder(images).mean((2, 3)))

    def features(self, images: Tensor) -> Tensor:
        """What is at every place: (places, FEATURES)."""
        return self.encoder(images).flatten(2).transpose(1, 2)


class FeatureTransformer(nn.Module):
    def __init__(self, places: int, classes: int, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.inward = nn.Linear(FEATURES, width)
        self.places = nn.Parameter(0.02 * torch.randn(places, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, classes)

    def forward(self, features: Tensor) -> Tensor:
        return self.head(self.blocks(self.inward(features) + self.places).mean(1))
