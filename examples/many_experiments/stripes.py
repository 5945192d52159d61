"""Stripes in noise: an HDF5 file of small images whose label is the direction of their stripes.

Covers: making data of any size. Does not cover: learning from them (experiment.py).
"""

from __future__ import annotations

from pathlib import Path

import h5py
import numpy as np

SIDE = 32
CLASSES = 8
ROW = SIDE * SIDE * 3  # bytes of an image
AT_A_TIME = 1024


def write(path: Path, size: int) -> None:
    """A file of about ``size`` bytes."""
    random = np.random.default_rng(0)
    count = max(AT_A_TIME, size // ROW)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (count, SIDE, SIDE, 3), np.uint8)
        labels = file.create_dataset("labels", (count,), np.int64)
        for start in range(0, count, AT_A_TIME):
            end = min(start + AT_A_TIME, count)
            chosen = random.integers(0, CLASSES, end - start)
            images[start:end], labels[start:end] = draw(random, chosen), chosen


def draw(random: np.random.Generator, labels: np.ndarray) -> np.ndarray:
    """An image for each label: a wave in its direction, of random phase and length, and noise."""
    angle = labels * np.pi / CLASSES
    phase, length = random.uniform(0, 2 * np.pi, len(labels)), random.uniform(5, 9, len(labels))
    rows, columns = np.mgrid[:SIDE, :SIDE].astype(np.float32)
    along = np.einsum("n,yx->nyx", np.sin(angle), rows) + np.einsum("n,yx->nyx", np.cos(angle), columns)
    wave = 60 + 40 * np.sin(2 * np.pi * along / length[:, None, None] + phase[:, None, None])
    noise = random.integers(0, 100, (len(labels), SIDE, SIDE, 3), dtype=np.uint8)
    return wave[..., None].astype(np.uint8) + noise
