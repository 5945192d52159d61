"""Data for the tests of batches, without a store: 97 rows whose values say which row they are."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from legroom.loader.batches.legroom_open import Data, open

ROWS = 97


def write(folder: Path, rows: int = ROWS, **more: Any) -> Path:
    """A file with images and labels (and whatever else is given)."""
    path = folder / "rows.h5"
    with h5py.File(path, "w") as file:
        images = np.arange(rows, dtype=np.float32)[:, None, None] + np.zeros((1, 4, 3), np.float32)
        file["images"] = images
        file["labels"] = np.arange(rows, dtype=np.int64)
        for name, value in more.items():
            file[name] = value
    return path


def plain(folder: Path, monkeypatch: Any, **more: Any) -> Data:
    """The same, opened in this process alone."""
    monkeypatch.setenv("LEGROOM_DISABLE", "1")
    return open(write(folder, **more))


def labels(batches: Any, most: int | None = None) -> list[list[int]]:
    """The labels of (at most so many of) a loop's batches; every batch is checked to be of one piece."""
    found: list[list[int]] = []
    if most == 0:
        return found
    for batch in batches:
        assert (np.asarray(batch["images"])[:, 2, 1] == np.asarray(batch["labels"])).all()
        found.append(np.asarray(batch["labels"]).tolist())
        if len(found) == most:
            break
    return found


def flat(lists: Iterable[list[int]]) -> list[int]:
    """All of them in one list."""
    return list(chain.from_iterable(lists))
