"""What bench/cache.py measures in processes of their own.

    python bench/cache_child.py first PATH             the first open of a process, its imports apart
    python bench/cache_child.py preload PATH           the same by h5py, into memory of its own
    python bench/cache_child.py epochs PATH HOW COUNT NPY
                                                       random gathers; HOW: at-once, ready or plain
    python bench/cache_child.py storm PATH FOLDER N    one of many that open a cold file at the same moment

Each prints one JSON object.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

BATCH = 64
IMAGE = (256, 256, 3)


def first(path: str) -> dict[str, float]:
    """Milliseconds of the imports, of the first open with its first row, and of the second."""
    start = time.perf_counter()
    import numpy  # noqa: F401

    numpy_done = time.perf_counter()
    from legroom import open

    imported = time.perf_counter()
    times = []
    for _ in range(2):
        begun = time.perf_counter()
        data = open(path)
        data["images"][0].max()
        times.append(1e3 * (time.perf_counter() - begun))
        data.ready()
        del data
    return {
        "numpy_ms": 1e3 * (numpy_done - start),
        "legroom_ms": 1e3 * (imported - numpy_done),
        "first_ms": times[0],
        "second_ms": times[1],
    }


def preload(path: str) -> dict[str, float]:
    """Milliseconds of reading it all with h5py, once, in a fresh process."""
    import h5py

    begun = time.perf_counter()
    with h5py.File(path, "r") as file:
        kept = file["images"][:]
    kept[0].max()
    return {"first_ms": 1e3 * (time.perf_counter() - begun)}


def epochs(path: str, how: str, count: str, npy: str) -> dict[str, Any]:
    """GB/s of three epochs: batches of random rows gathered into one reused buffer."""
    import numpy as np

    from legroom import open

    rng = np.random.default_rng(7)
    rows = int(count)
    orders = [rng.permutation(rows) for _ in range(3)]
    out = np.ones((BATCH, *IMAGE), np.uint8)  # written once: its own pages are not what is measured
    if how == "plain":  # the same file, mapped without any pre-fault: what there is to gain
        images = np.load(npy, mmap_mode="c")
    else:
        data = open(path)
        images = data["images"]
        if how == "ready":
            data.ready()
    rates = []
    for order in orders:
        start = time.perf_counter()
        for at in range(0, rows - BATCH + 1, BATCH):
            # In mode "raise" numpy gathers into a buffer of its own first, a third as fast.
            np.take(images, order[at : at + BATCH], axis=0, out=out, mode="clip")
        rates.append(rows // BATCH * out.nbytes / (time.perf_counter() - start) / 1e9)
    return {"rates": rates}


def storm(path: str, folder: str, number: str) -> dict[str, Any]:
    """Open when told to, say when it is done, and what it cost."""
    import numpy  # noqa: F401

    from legroom import open
    from legroom.cache import elect_builder_and_publish, store_directories  # noqa: F401  (imported ahead, so that the storm is of opens alone)

    taken: list[str] = []
    store_directories.step_hook = taken.append
    place = Path(folder)
    (place / f"started-{number}").touch()
    _wait_for(place / "go")
    before = _read_bytes()
    data = open(path)
    first_row = int(data["images"][0].sum())
    opened = time.monotonic()
    read = _read_bytes() - before
    data.ready()
    (place / f"opened-{number}").touch()
    _wait_for(place / "measure")
    extent = data.where("images")
    assert extent is not None
    pss = sum(_pss(str(extent.path.parent)))
    (place / f"measured-{number}").touch()
    _wait_for(place / "end")
    loads = sum(name == "read" for name in taken)
    return {"opened": opened, "row": first_row, "read": read, "loads": loads, "pss": pss}


def _wait_for(path: Path) -> None:
    while not path.exists():
        time.sleep(0.002)


def _read_bytes() -> int:
    """What this process has read by read(2) and its relatives, from wherever it came."""
    line = Path("/proc/self/io").read_text().splitlines()[0]
    return int(line.removeprefix("rchar:"))


def _pss(below: str) -> list[int]:
    """The proportional share of every mapping of files below a directory, in bytes."""
    found: list[int] = []
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split(maxsplit=5)
        if not head[0].endswith(":"):
            inside = len(head) == 6 and head[5].startswith(below)
        elif inside and head[0] == "Pss:":
            found.append(int(head[1]) * 1024)
    return found


if __name__ == "__main__":
    scenes: dict[str, Callable[..., dict[str, Any]]] = {
        "first": first,
        "preload": preload,
        "epochs": epochs,
        "storm": storm,
    }
    print(json.dumps({"pid": os.getpid(), **scenes[sys.argv[1]](*sys.argv[2:])}))
