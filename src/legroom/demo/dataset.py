"""The dataset of the demo: noisy images with a bright stripe, whose place is the label.

Covers: writing it as HDF5, a piece at a time; reading it back as anybody would. Does not cover: how large it should be
(scale.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

IMAGE = (3, 64, 64)
CLASSES = 8
ROW_BYTES = IMAGE[0] * IMAGE[1] * IMAGE[2]
_PIECE = 512  # rows written at once
_STRIPE = IMAGE[2] // CLASSES


def make_dataset(path: Path, rows: int, between: Callable[[], object] = lambda: None) -> int:
    """Write so many images; the bytes of the file. ``between`` is called after every piece."""
    import h5py
    import numpy as np

    random = np.random.default_rng(rows)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (rows, *IMAGE), dtype=np.uint8)
        labels = file.create_dataset("labels", (rows,), dtype=np.int64)
        for start in range(0, rows, _PIECE):
            count = min(_PIECE, rows - start)
            piece = random.integers(0, 200, (count, *IMAGE), dtype=np.uint8)
            places = random.integers(0, CLASSES, count)
            for number, place in enumerate(places):
                piece[number, :, :, place * _STRIPE : (place + 1) * _STRIPE] += 40
            images[start : start + count] = piece
            labels[start : start + count] = places
            between()
    return path.stat().st_size


def read_plainly(path: Path) -> float:
    """Seconds in which h5py reads all of it into arrays of this process, which go again."""
    import h5py

    began = time.perf_counter()
    with h5py.File(path) as file:
        arrays = [file[name][:] for name in file]
    seconds = time.perf_counter() - began
    del arrays
    return seconds
