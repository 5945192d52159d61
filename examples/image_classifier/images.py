"""A folder of images as a dataset: DIR/CLASS/*.jpg, .png or .npy, each brought to one size."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from torch.nn.functional import interpolate
from torch.utils.data import Dataset

from legroom.messages import either

HELD_OUT = 5  # every fifth image of a class is for measuring, not for training
DECODED = (".jpg", ".jpeg", ".png")  # by Pillow
KINDS = (*DECODED, ".npy")


class Images(Dataset[tuple[torch.Tensor, int]]):
    """Images (3, size, size) between 0 and 1, with the number of their class."""

    def __init__(self, folder: Path, size: int, *, held_out: bool) -> None:
        self.size = size
        found = sorted(path for path in folder.glob("*/*") if path.suffix.lower() in KINDS)
        self.classes = sorted({path.parent.name for path in found})
        self.files = [
            (path, label)
            for label, name in enumerate(self.classes)
            for number, path in enumerate(path for path in found if path.parent.name == name)
            if (number % HELD_OUT == 0) == held_out
        ]
        if len(self.classes) < 2 or not self.files:
            raise FileNotFoundError(
                either(
                    f"{folder} must hold two folders or more, each with two images or more (.jpg, .png, .npy)",
                    f"{folder} 下应有两个以上的类别文件夹，每个至少两张图像（.jpg、.png、.npy）",
                )
            )
        for path, _ in self.files:
            check(path)

    def __len__(self) -> int:
        return len(self.files)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        path, label = self.files[index]
        image = torch.from_numpy(pixels(path)).permute(2, 0, 1)[None] / 255
        return interpolate(image, (self.size, self.size), mode="bilinear", antialias=True)[0], label


def pixels(path: Path) -> np.ndarray:
    """The image as (height, width, 3) of uint8; grey and transparent ones become RGB."""
    if path.suffix.lower() == ".npy":
        return np.load(path)
    with opened(path) as image:
        return np.array(image.convert("RGB"))


def opened(path: Path):
    try:
        from PIL import Image
    except ImportError as problem:
        raise OSError(
            either(f"{path} needs Pillow: pip install pillow", f"读取 {path} 需要 Pillow：pip install pillow")
        ) from problem
    return Image.open(path)


def check(path: Path) -> None:
    """Look at the file's first bytes: better now than in the middle of an epoch."""
    if path.suffix.lower() in DECODED:
        with opened(path):  # an OSError where it is no image
            return
    try:
        image = np.load(path, mmap_mode="r")
    except (ValueError, EOFError) as problem:
        raise OSError(either(f"{path} is not a .npy file: {problem}", f"{path} 不是 .npy 文件：{problem}")) from problem
    if image.ndim != 3 or image.shape[2] != 3 or image.dtype != np.uint8:
        raise OSError(
            either(
                f"{path} must be (height, width, 3) of uint8, got {image.shape} of {image.dtype}",
                f"{path} 应为 uint8 的 (height, width, 3)，实为 {image.dtype} 的 {image.shape}",
            )
        )
