"""Forked workers that read a list of Python objects copy it; arrays and bytes stay shared.

Covers: a list of dicts, a numpy array, a buffer of pickled bytes. Does not cover: garbage collection, which touches
objects too and is off here.
"""

from __future__ import annotations

import gc
import os
import pickle
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import experiment as ex

COUNT, WORKERS = 100_000, 2


def private(pid: int | str) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    found = re.search(r"^Private_Dirty:\s+(\d+) kB$", text, re.M)
    assert found is not None
    return int(found[1]) * 1024


def case(make: Callable[[], Any], read: Callable[[Any], None]) -> tuple[int, int]:
    """The size of the data in the parent, and what one worker has copied after it read everything."""
    before = private("self")
    data = make()
    gc.collect()
    size = private("self") - before
    (go, tell), (hear, done) = os.pipe(), os.pipe()
    pids = []
    for _ in range(WORKERS):
        pid = os.fork()
        if pid == 0:
            gc.disable()
            os.read(go, 1)
            read(data)
            os.write(done, b".")
            os.read(go, 1)
            os._exit(0)
        pids.append(pid)
    try:
        start = [private(pid) for pid in pids]
        os.write(tell, b"." * WORKERS)
        for _ in pids:
            os.read(hear, 1)
        return size, max(private(pid) - first for pid, first in zip(pids, start, strict=True))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def records() -> list[dict[str, Any]]:
    return [{"id": index, "path": f"img/{index}.jpg", "box": [index * 1.0, 2.0]} for index in range(COUNT)]


def read_list(data: list[dict[str, Any]]) -> None:
    for one in data:
        one["path"], one["box"][0]


def read_array(data: Any) -> None:
    for row in data:
        row.sum()


def as_bytes() -> tuple[bytes, Any]:
    import numpy as np

    parts = [pickle.dumps(one) for one in records()]
    return b"".join(parts), np.cumsum([0, *map(len, parts)])


def read_bytes(data: tuple[bytes, Any]) -> None:
    buffer, offsets = data
    for index in range(COUNT):
        pickle.loads(buffer[offsets[index] : offsets[index + 1]])["path"]


def main() -> None:
    ex.need_module("numpy")
    import numpy as np

    cases: dict[str, tuple[Callable[[], Any], Callable[[Any], None]]] = {
        "list of dicts": (records, read_list),
        "numpy array": (lambda: np.ones((COUNT, 40)), read_array),
        "buffer of bytes": (as_bytes, read_bytes),
    }
    rows, shares = [], {}
    for name, (make, read) in cases.items():
        size, copied = case(make, read)
        shares[name] = copied / size
        rows.append((name, ex.mb(size), ex.mb(copied), f"{copied / size:.2f}"))
    ex.table(("data", "size in the parent", "copied by each worker", "copies"), rows)
    ex.verdict(
        {
            "a worker copies more than half of the list": shares["list of dicts"] > 0.5,
            "a worker copies little of the array": shares["numpy array"] < 0.1,
            "a worker copies little of the bytes": shares["buffer of bytes"] < 0.1,
        }
    )


if __name__ == "__main__":
    main()
