"""What trials and workers have in common: rows of an .npy object as samples, and a small model.

Each row of the object is a flat image of SIDE x SIDE bytes and its label.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset

SIDE, CLASSES = 32, 4


def write(path: Path, count: int) -> None:
    """Stripes in noise; the label is their direction."""
    random = np.random.default_rng(0)
    labels = random.integers(0, CLASSES, count)
    y, x = np.mgrid[:SIDE, :SIDE]
    angle = (labels * np.pi / CLASSES)[:, None, None]
    wave = 90 + 60 * np.sin((y * np.sin(angle) + x * np.cos(angle)) / 2)
    images = wave + random.integers(0, 60, (count, SIDE, SIDE))
    np.save(path, np.concatenate([images.reshape(count, -1), labels[:, None]], axis=1).astype(np.uint8))


class Rows(Dataset):
    """Crops an image at random and turns it into floats. Pickled, it attaches to the copy of its node again."""

    def __init__(self, data) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data["array"])

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        row = self.data["array"][index]
        top, left = torch.randint(0, 5, (2,)).tolist()
        image = torch.from_numpy(row[:-1].reshape(SIDE, SIDE)[top : top + 28, left : left + 28].astype(np.float32))
        return image.div_(127.5).sub_(1)[None], int(row[-1])


def model() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 8, 5, stride=2), nn.ReLU(), nn.Conv2d(8, 16, 5, stride=2), nn.ReLU(),
        nn.Flatten(), nn.LazyLinear(CLASSES),
    )  # fmt: skip
