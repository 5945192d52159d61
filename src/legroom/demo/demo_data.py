"""The data of the demo: how much of it this machine can take, decided from numbers alone, and writing it as HDF5.

The memory of a process is only estimated here, on the safe side. The figures that the demo shows are measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from legroom.errors import NoRoom
from legroom.units import format_size
from legroom.words import say

Engine = Literal["torch", "numpy"]

IMAGE = (3, 64, 64)
CLASSES = 8
ROW_BYTES = IMAGE[0] * IMAGE[1] * IMAGE[2]
RUNS = 4
_MB = 1 << 20
_FEWEST = 2  # a single run shares with no other
_LARGEST, _LARGEST_QUICK, SMALLEST = 512 * _MB, 96 * _MB, 8 * _MB
_SHARE = 0.8  # of the free memory
_OWN = 90 * _MB  # the demo itself, with its chart
_RUN: dict[Engine, int] = {"torch": 180 * _MB, "numpy": 36 * _MB}  # with its supervisor, without data
_LOADERS = 700 * _MB  # torch, its workers, and batches on their way
DISK_COPIES = 3  # the file, the shared copy, and some to spare
_QUEUED = 5  # batches that torch's DataLoader with two workers keeps in /dev/shm, at least
_LARGEST_SHM = 256 * _MB  # a larger /dev/shm is not filled for a demo


@dataclass(frozen=True, slots=True)
class Size:
    """What the demo will do, and in ``notes`` what is smaller than elsewhere."""

    engine: Engine
    rows: int
    runs: int
    quick: bool
    no_loaders: str | None = None  # why DataLoaders are not tried
    notes: tuple[str, ...] = ()


def demo_size(
    ram: int | None, disk: int, *, no_torch: str | None, quick: bool, in_memory: bool = False
) -> Size:
    """What fits into so many free bytes; ``in_memory``: the disk is memory too, ``no_torch``: why not with torch."""
    largest = _LARGEST_QUICK if quick else _LARGEST
    notes: list[str] = []
    if ram is None:
        notes.append(say("free memory is unknown: the demo stays small"))
        ram = 4 * _LARGEST_QUICK + _OWN
    free = format_size(ram)
    engine: Engine = "torch" if no_torch is None else "numpy"
    no_loaders = no_torch
    if engine == "torch" and _data(ram, engine, RUNS, in_memory) < SMALLEST:
        engine, no_loaders = "numpy", say("not enough memory for torch: {free} free", free=free)
        notes.append(say("{why}; the training runs use numpy", why=no_loaders))
    elif engine == "torch" and ram < _LOADERS:
        no_loaders = say("not enough memory for DataLoader workers: {free} free", free=free)
        notes.append(no_loaders)
    counts = range(RUNS, _FEWEST - 1, -1)
    runs = next((count for count in counts if _data(ram, engine, count, in_memory) >= SMALLEST), 0)
    if not runs:
        held = _FEWEST * _RUN[engine] + (_FEWEST + DISK_COPIES * in_memory) * SMALLEST
        raise NoRoom(
            say("not enough memory for the demo: {free} free", free=free),
            why=say("two training runs on {data} need about {need}",
                    data=format_size(SMALLEST), need=format_size(int(held / _SHARE + _OWN))),
            fix=(say("free some memory; see what limits it:\nlegroom doctor"),),
        )  # fmt: skip
    if runs < RUNS:
        notes.append(
            say(
                "{count} training runs instead of {all}: {free} of memory free",
                count=runs,
                all=RUNS,
                free=free,
            )
        )
    data = min(largest, _data(ram, engine, runs, in_memory), disk // DISK_COPIES)
    if data < largest:
        sizes = {"data": data, "largest": largest, "ram": ram, "disk": disk}
        notes.append(say("{data} of data instead of {largest}: {ram} of memory and {disk} of disk free",
                         **{name: format_size(size) for name, size in sizes.items()}))  # fmt: skip
    return Size(engine, data // ROW_BYTES, runs, quick, no_loaders, tuple(notes))


def _data(ram: int, engine: Engine, runs: int, in_memory: bool) -> int:
    """The most data of which every run can hold a copy."""
    return int(((ram - _OWN) * _SHARE - runs * _RUN[engine]) / (runs + DISK_COPIES * in_memory))


def rows_that_overflow(shm_size: int | None) -> int | None:
    """Rows of float images in a batch, so that the batches of torch's DataLoader do not fit; None: not to be tried."""
    if shm_size is None or shm_size > _LARGEST_SHM:
        return None
    return max(1, int(shm_size * 1.5 / _QUEUED / (4 * ROW_BYTES)))


def make_dataset(path: Path, rows: int, between: Callable[[], object] = lambda: None) -> int:
    """Write noisy images whose bright stripe is the label, calling ``between`` now and then; the bytes written."""
    import h5py
    import numpy as np

    random, stripe = np.random.default_rng(rows), IMAGE[2] // CLASSES
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (rows, *IMAGE), dtype=np.uint8)
        labels = file.create_dataset("labels", (rows,), dtype=np.int64)
        for start in range(0, rows, 512):
            count = min(512, rows - start)
            chunk = random.integers(0, 200, (count, *IMAGE), dtype=np.uint8)
            labels[start : start + count] = where = random.integers(0, CLASSES, count)
            for image, label in zip(chunk, where, strict=True):
                image[:, :, label * stripe : (label + 1) * stripe] += 40
            images[start : start + count] = chunk
            between()
    return path.stat().st_size


def h5py_seconds(path: Path) -> float:
    """The time in which h5py reads all of the file into memory."""
    import h5py

    began = time.perf_counter()
    with h5py.File(path) as file:
        arrays = [file[name][:] for name in file]
    seconds = time.perf_counter() - began
    del arrays
    return seconds
