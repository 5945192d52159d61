"""The files, stores and processes that bench/cache.py measures with.

Covers: sources in the page cache, stores that are cold again, children. Does not cover: any figure.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np

import legroom
from cache_child import IMAGE
from legroom.cache.elect_builder_and_publish import build  # noqa: F401  (imported ahead: a load is measured, not its imports)
from measure import Row, settle, timed, warm

CHILD = Path(__file__).with_name("cache_child.py")
ROW = int(np.prod(IMAGE))
Measured = tuple[list[Row], dict[str, Any]]


class Bench:
    """Sizes, rounds and places of one run."""

    def __init__(self, memory: Path, disk: Path, rounds: int, scale: float) -> None:
        self.memory, self.disk, self.rounds, self.scale = memory, disk, rounds, scale

    def file(self, megabytes: float, name: str) -> Path:
        """Contiguous random images in an HDF5 file, in the page cache and old enough."""
        path = self.disk / f"{name}.h5"
        count = max(64, int(megabytes * self.scale * 1e6) // ROW)
        with h5py.File(path, "w") as file:
            made = file.create_dataset("images", (count, *IMAGE), "u1")
            for at in range(0, count, 256):
                rows = min(256, count - at)
                made[at : at + rows] = np.frombuffer(np.random.default_rng(at).bytes(rows * ROW), "u1").reshape(
                    rows, *IMAGE
                )
        os.sync()  # or writing it back falls into another measurement
        warm(path)
        settle(path)
        return path

    def size(self, megabytes: float) -> str:
        """A nominal size as it is in this run."""
        return f"{megabytes * self.scale:.0f} MB"

    def clear(self) -> None:
        """No store at all: the next open is as cold as the first ever."""
        for folder in (self.memory, self.disk):
            shutil.rmtree(folder / f"legroom-{os.geteuid()}", ignore_errors=True)

    def cold(self, path: Path, **options: Any) -> Callable[[], float]:
        """Seconds of a first open; what it left is removed outside the clock."""

        def work() -> float:
            self.clear()
            data: list[Any] = []
            seconds = timed(lambda: data.append(legroom.open(path, **options)))
            data[0].ready()  # its pre-fault must not run into the next contender's time
            data.clear()
            self.clear()
            return seconds

        return work

    def process(self, program: str, path: Path) -> Callable[[], float]:
        """Seconds of a whole Python process that runs ``program`` on that file."""
        return lambda: timed(lambda: subprocess.run([sys.executable, "-c", program, str(path)], check=True))

    def child(self, *arguments: object) -> dict[str, Any]:
        command = [sys.executable, str(CHILD), *map(str, arguments)]
        found: dict[str, Any] = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
        return found


def preload(path: Path) -> np.ndarray:
    with h5py.File(path, "r") as file:
        found: np.ndarray = file["images"][:]
        return found
