"""Batches on a CUDA device: which way they take, and why.

Covers: choosing the path. Does not cover: the paths themselves (cuda/device.py, cuda/resident.py,
cuda/staged.py).

    cuda-resident     the arrays are in the card's memory, gathered there         resident=True
    cuda-registered   the shared copy is registered, gathered by the GPU          entries in shared memory
    cuda-pinned       gathered into page-locked buffers, then copied              entries on disk; not registrable
    cuda-copy         gathered into ordinary memory, then copied                  where nothing can be page-locked

Entries on disk are not registered: that would bring all of them into memory and hold them there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from legroom.loader.cuda.device import open_registered
from legroom.loader.cuda.driver import Driver, Refused, open_driver
from legroom.loader.cuda.resident import open_resident
from legroom.loader.cuda.rows import rows_of
from legroom.loader.cuda.staged import StagedGatherer
from legroom.loader.rows.gather import Gatherer
from legroom.model import Entry
from legroom.words import say

NDArray = np.ndarray[Any, Any]


def open_gatherer(
    columns: Mapping[str, NDArray],
    entry: Entry,
    device: object,
    *,
    resident: bool = False,
    files: Mapping[str, tuple[Path, int]],
    driver: Driver | None = None,
) -> Gatherer:
    """The gatherer for these columns; ``files`` says in which file, and at which offset, a column lies.

    ``driver`` is the device's unless a test brings its own.
    """
    driver = driver or open_driver(device)
    rows = {name: rows_of(name, column) for name, column in columns.items()}
    if resident:
        return open_resident(driver, columns, rows)
    why = _why_not_registered(entry, columns, files) or driver.why_no_registering()
    if why is None:
        try:
            return open_registered(driver, columns, rows, files)
        except Refused as refusal:
            why = say("CUDA did not register the shared copy: {refusal}", refusal=refusal)
    return StagedGatherer(driver, columns, rows, why)


def _why_not_registered(
    entry: Entry, columns: Mapping[str, NDArray], files: Mapping[str, tuple[Path, int]]
) -> str | None:
    """Why registering is not tried, or None."""
    if entry.backing == "disk":
        return say("the entry is on disk; registering would hold all of it in memory")
    if entry.backing != "shm":
        return say("the data are not in the shared cache ({backing})", backing=entry.backing)
    for name, column in columns.items():
        if column.nbytes and (name not in files or not column.flags.c_contiguous):
            return say("{name} is no array of its own in a file of the cache", name=name)
    return None
