"""A folder of images as a dataset: DIR/CLASS/*.npy, each brought to one size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

HELD_OUT = 5  # every fifth image of a class is for measuring, not for training


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images (3, size, size) between 0 and 1, with the number of their class."""

    def __init__(self, folder: Path, size: int, *, held_out: bool) -> None:
        self.size = size
        self.classes = sorted({path.parent.name for path in folder.glob("*/*.npy")})
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for number, path in enumerate(sorted((folder / name).glob("*.npy")))
            if (number % HELD_OUT == 0) == held_out
        ]
        if len(self.classes) < 2 or not self.files:
            raise FileNotFoundError(
                f"{folder} must hold two folders or more, each with two .npy images or more"
            )
        for path, _ in self.files:
            check(path)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = torch.from_numpy(np.load(path)).permute(2, 0, 1)[None] / 255
        return interpolate(image, (self.size, self.size), mode="bilinear", antialias=True)[0], label


def check(path: Path) -> None:
    """Look at the file's first bytes: better now than in the middle of an epoch."""
    try:
        image = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as problem:
        raise OSError(f"{path} is no .npy file: {problem}") from problem
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise OSError(f"{path} must be (height, width, 3) of uint8, and is {image.shape} of {image.dtype}")
