"""The data of a training: where the arrays lie, and the samples made of them.

Covers: opening in three ways, checking, augmenting. Does not cover: making the file (make_data.py), learning.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import h5py
import numpy as np
import torch
from torch.utils.data import Dataset

import legroom
from legroom.errors import MissingKey, UnreadableSource

KEYS = ("images", "heatmaps")


class Eyes(Dataset):
    """Some images with their heatmaps, as float32 in 0 to 1; in training, flipped and brightened at random."""

    def __init__(self, data: Mapping[str, np.ndarray], rows: range, *, augment: bool) -> None:
        self.data, self.rows, self.augment = data, rows, augment

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        image, heatmap = (scaled(self.data[name][self.rows[index]]) for name in KEYS)
        if self.augment:
            if torch.rand(()) < 0.5:
                image, heatmap = image.flip(-1), heatmap.flip(-1)
            image = image * (0.8 + 0.4 * torch.rand(()))
        return image, heatmap


def scaled(array: np.ndarray) -> torch.Tensor:
    """(rows, columns) to a tensor (1, rows, columns); bytes become numbers from 0 to 1."""
    numbers = torch.as_tensor(array, dtype=torch.float32)[None]
    return numbers / 255 if array.dtype == np.uint8 else numbers


def open_data(path: Path, *, shared: bool, preload: bool) -> tuple[Mapping[str, np.ndarray], str]:
    """The arrays, and in words where they lie."""
    if shared:
        data = legroom.open(path)  # the first training loads the file, every later one finds the copy
        if preload:
            data.ready()  # every page mapped: the first epoch is as fast as the second
        return data, f"the shared copy ({data.info.backing})"
    if preload:
        return own_copy(path), "a copy of its own"
    return legroom.open(path, backing="inplace"), "the file itself, mapped"


def own_copy(path: Path) -> dict[str, np.ndarray]:
    """The arrays, read into this process."""
    try:
        with h5py.File(path) as file:
            for name in KEYS:
                if not isinstance(file.get(name), h5py.Dataset):
                    raise MissingKey(f"{path} has no array '{name}'", why=f"it holds {', '.join(file) or 'nothing'}")
            return {name: file[name][:] for name in KEYS}
    except OSError as problem:
        why = str(problem) if path.is_file() else "there is no such file"
        raise UnreadableSource(f"cannot read {path}", why=why) from problem


def why_unfit(data: Mapping[str, np.ndarray], multiple: int) -> str | None:
    """Why a training cannot use the arrays, if it cannot; the sides of images must divide by ``multiple``."""
    images, heatmaps = (data[name].shape for name in KEYS)
    if images != heatmaps or len(images) != 3:
        return f"images and heatmaps must both be (images, rows, columns), and are {images} and {heatmaps}"
    if images[0] < 2:
        return "two images are needed at least: one to learn from, one to test on"
    if images[1] % multiple or images[2] % multiple:
        return f"the sides of images must divide by {multiple}, and are {images[1]} x {images[2]}"
    return None
