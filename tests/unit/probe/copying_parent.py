"""A process with a dataset that forks one worker: run by the tests of copied memory, in which the reader is another process.

    python copying_parent.py KIND MEGABYTES

Prints the worker's pid. For each line on its input the worker does one step, and it prints a line. The parent has read
many records before the fork and freed half of them: memory that a worker's malloc uses again, page by page.
"""

from __future__ import annotations

import gc
import os
import random
import sys
from collections.abc import Callable
from typing import Any

import numpy as np

STEP = 8000


def main() -> None:
    kind, large = sys.argv[1], np.ones(int(sys.argv[2]) << 17)
    freed: list[Any] = [[number, str(number)] for number in range(120_000)]
    freed += [bytes([number % 251 + 1]) * 1500 for number in range(60_000)]
    random.Random(0).shuffle(freed)
    kept = freed[::2]
    del freed
    records = [[float(number), str(number)] for number in range(12 * STEP)]
    names = [f"images/{number:08d}.jpg" for number in range(60 * STEP)] if kind == "names" else []
    arrays = [np.ones(25_000) for _ in range(40)]
    own: list[Any] = []

    def read(at: int) -> None:
        for record in records[at * STEP : (at + 1) * STEP]:
            record[0]

    def look_up(at: int) -> None:
        for name in names[at * 5 * STEP : (at + 1) * 5 * STEP]:
            hash(name)

    def read_arrays(at: int) -> None:
        own.append([np.arange(500.0) + array.sum() + large[at] for array in arrays for _ in range(20)])

    def remember(at: int) -> None:
        own.append([[float(number), str(number)] for number in range(STEP)])
        own.append([bytes([at + 1]) * 1200 for _ in range(1500)])

    work: dict[str, Callable[[int], None]] = {
        "records": read, "names": look_up, "arrays": read_arrays, "own objects": remember,
    }  # fmt: skip
    (go, tell), (hear, done) = os.pipe(), os.pipe()
    pid = os.fork()
    if pid == 0:
        gc.disable()  # a full collection copies every container once, whatever the dataset is
        os.close(tell)  # so that it reads the end when its parent is gone
        try:
            at = 0
            while os.read(go, 1):
                work[kind](at)
                at += 1
                os.write(done, b".")
        finally:
            os._exit(0)
    os.close(go)
    print(pid, flush=True)
    for _ in sys.stdin:
        os.write(tell, b".")
        os.read(hear, 1)
        print("done", flush=True)
    del kept


if __name__ == "__main__":
    main()
