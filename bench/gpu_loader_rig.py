"""What the GPU benchmark's contenders share: the data, the clock, turns, errors kept as text.

Covers: how figures are taken. Does not cover: what is measured (gpu_loader_paths.py), what it means (gpu_loader.py).
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

import legroom
from measure import alternate, settle, spreads

ROW = 3 * 256 * 256
DEVICE = "cuda"
Contender = Callable[[], float]  # measures itself: bytes a second


class Bench:
    """The data, and what was found out about them."""

    def __init__(self, folder: Path, rows: int, rounds: int) -> None:
        self.folder, self.rows, self.rounds = folder, rows, rounds
        self.figures: dict[str, list[float]] = {}
        self.notes: dict[str, Any] = {}
        self.errors: dict[str, str] = {}
        self._data: dict[str, Any] = {}

    def source(self, row: int = ROW, rows: int | None = None) -> Path:
        """A file of images of ``row`` bytes each."""
        count = rows or self.rows
        path = self.folder / f"{count}x{row}.npz"
        if not path.exists():
            images = np.random.default_rng(1).integers(0, 256, (count, row), np.uint8)
            np.savez(path, images=images, labels=np.arange(count))
            settle(path)
        return path

    def data(self, backing: str = "shm", row: int = ROW, rows: int | None = None) -> Any:
        """Those images in a store, every page mapped."""
        key = f"{backing} {self.source(row, rows)}"
        if key not in self._data:
            self._data[key] = legroom.open(self.source(row, rows), backing=backing)
            self._data[key].ready()
        return self._data[key]

    def close(self) -> None:
        """Let go of the data."""
        for data in self._data.values():
            data.close()
        self._data.clear()

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """What the work gives; what goes wrong is kept under that name, and None given."""
        try:
            return work()
        except Exception:
            self.errors[name] = traceback.format_exc(limit=-4)
            print(f"{name}: {self.errors[name]}", flush=True)
            return None

    def take_turns(self, part: str, makers: Mapping[str, Callable[[], Contender]]) -> None:
        """Every contender's rates, one a round; one that fails keeps its error and loses its turns."""
        named = {f"{part} {name}": make for name, make in makers.items()}
        made = {name: found for name, make in named.items() if (found := self.attempt(name, make)) is not None}
        turns = {name: partial(self._turn, name, contender) for name, contender in made.items()}
        for name, found in alternate(turns, self.rounds).items():
            if name not in self.errors:
                self.figures[name] = found

    def _turn(self, name: str, contender: Contender) -> float:
        rate = None if name in self.errors else self.attempt(name, contender)
        return 0.0 if rate is None else float(rate)

    def rate(self, name: str) -> float:
        """The best rate of a contender."""
        if name not in self.figures:
            raise LookupError(f"not measured: {name}")
        return max(self.figures[name])

    def rates(self) -> dict[str, dict[str, float]]:
        """Best, middle and worst of each, for the record; the most is the best."""
        return {
            name: {"best": found["worst"], "median": found["median"], "worst": found["best"]}
            for name, found in spreads(self.figures).items()
        }


def clocked(work: Callable[[], int]) -> float:
    """Bytes a second of work that returns how many bytes it moved; the GPU is done when the clock stops."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    moved = work()
    torch.cuda.synchronize()
    return moved / (time.perf_counter() - start)


def repeated(total: int, step: Callable[[int], int]) -> Contender:
    """A step that moves some bytes, done until so many have moved; it is told its number."""

    def work() -> int:
        moved = number = 0
        while moved < total:
            moved += step(number)
            number += 1
        return moved

    return partial(clocked, work)


def epochs(batches: Any, total: int) -> int:
    """Whole epochs until so many bytes have come."""
    moved = 0
    while moved < total:
        for batch in batches:
            moved += batch["images"].nbytes
    return moved


def on_path(batches: Any, path: str) -> Any:
    """The batches, if they take that path."""
    if batches.path != path:
        raise RuntimeError(f"{batches.path} in place of {path}: {batches.why}")
    return batches


def loop(batches: Any, path: str, total: int) -> Contender:
    """A plain loop over batches, warmed up."""
    epochs(on_path(batches, path), 1)
    return partial(clocked, partial(epochs, batches, total))
