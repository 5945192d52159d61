"""The same entry in pages of 4 kB and of 2 MB: what loading, reading and removing it take.

Covers: entries in memory, LEGROOM_LARGE_PAGES=0 against the default. Does not cover: entries on a disk.
"""

from __future__ import annotations

import os
import re
import shutil
import time
from collections import defaultdict
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

import legroom
from cache_rig import ROW, Bench, Measured
from measure import Row, timed

_NARROW = 64  # bytes of a row: a line of the processor's cache
_SWITCH = "LEGROOM_LARGE_PAGES"


def pages(bench: Bench) -> Measured:
    """An entry in memory, in small pages and in large ones."""
    path = bench.file(368, "pages")
    found: dict[str, dict[str, list[float]]] = {"0": defaultdict(list), "1": defaultdict(list)}
    before = os.environ.get(_SWITCH)
    try:
        for _ in range(bench.rounds):
            for switch, figures in found.items():
                os.environ[_SWITCH] = switch
                for name, value in _one(bench, path).items():
                    figures[name].append(value)
    finally:
        os.environ.pop(_SWITCH)
        if before is not None:
            os.environ[_SWITCH] = before
    small, large = found["0"], found["1"]
    rows = [Row("  in large pages, median", median(large["share"]), "of the entry")]
    for name in ("load, xxh3", "first epoch", "second epoch", "64-byte rows", "attach", "remove"):
        least = min(large[name])
        rows.append(Row(f"{name}: small / large pages", min(small[name]) / least, "×", note=_note(small, large, name)))
    return rows, {"small": small, "large": large}


def _note(small: dict[str, list[float]], large: dict[str, list[float]], name: str) -> str:
    return f"{1e3 * min(small[name]):.3g} : {1e3 * min(large[name]):.3g} ms"


def _one(bench: Bench, path: Path) -> dict[str, float]:
    """Everything about one entry, which is gone afterwards."""
    bench.clear()
    data: list[Any] = []
    figures = {"load, xxh3": timed(lambda: data.append(legroom.open(path, hash="xxh3")))}
    data[0].ready()
    images = data[0]["images"]
    figures["share"] = _share(images)
    narrow = images.reshape(-1, _NARROW)
    order = np.random.default_rng(0).permutation(len(narrow))[: 1 << 19]
    out = np.ones((1 << 16, _NARROW), np.uint8)
    figures["64-byte rows"] = min(_gather(narrow, order, out) for _ in range(3))
    npy, size = data[0].where("images").path, images.nbytes
    del images, narrow
    data.clear()
    run = bench.child("epochs", path, "at-once", size // ROW, npy)
    for name, rate in zip(("first epoch", "second epoch"), run["rates"], strict=False):
        figures[name] = size / 1e9 / rate
    figures["attach"] = min(_attach(path) for _ in range(5))
    figures["remove"] = timed(lambda: shutil.rmtree(npy.parent))
    bench.clear()
    return figures


def _gather(rows: np.ndarray, order: np.ndarray, out: np.ndarray) -> float:
    start = time.perf_counter()
    for at in range(0, len(order) - len(out) + 1, len(out)):
        np.take(rows, order[at : at + len(out)], axis=0, out=out, mode="clip")
    return time.perf_counter() - start


def _attach(path: Path) -> float:
    start = time.perf_counter()
    data = legroom.open(path, hash="xxh3")
    data["images"][0].max()
    seconds = time.perf_counter() - start
    data.ready()
    return seconds


def _share(array: np.ndarray) -> float:
    """How much of an array is mapped by large pages."""
    begin = array.ctypes.data // 4096 * 4096
    area = re.search(rf"^{begin:x}-.*?ShmemPmdMapped: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.M | re.S)
    return 1024 * int(area.group(1)) / array.nbytes if area else 0.0
