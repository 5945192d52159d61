"""Python 3.12 does not need spawn: fork works there, and is the default on Linux up to 3.13.

Covers: every Python found here: its default start method and eight forked processes, with and without a
second thread; and for the Python that runs this, torch's loader under each start method.
Does not cover: CUDA in forked workers, which no Python can do; Pythons that are not installed.
"""

from __future__ import annotations

import json
import multiprocessing
import shutil
import sys
import threading
import time
import warnings
from multiprocessing.queues import SimpleQueue
from pathlib import Path
from typing import Any

import experiment as ex

METHODS = ("fork", "forkserver", "spawn")


def send(queue: SimpleQueue[int], number: int) -> None:
    queue.put(2 * number)


def look() -> None:
    """In any Python from 3.11 on, without torch: what its fork does."""
    default = multiprocessing.get_start_method()  # asked first: making a context could fix it
    context, found = multiprocessing.get_context("fork"), []
    for threaded in (False, True):
        stop = threading.Event()
        if threaded:
            threading.Thread(target=stop.wait, daemon=True).start()
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            queue = context.SimpleQueue()
            workers = [context.Process(target=send, args=(queue, number)) for number in range(8)]
            for worker in workers:
                worker.start()
            found.append(sorted(queue.get() for _ in workers) == [0, 2, 4, 6, 8, 10, 12, 14])
            for worker in workers:
                worker.join()
        stop.set()
        found.append(any("fork" in str(warning.message) for warning in caught))
    print(json.dumps([sys.version.split()[0], default, *found]))


class Rows:
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index


def load(method: str) -> None:
    """torch's loader with two workers; prints whether every row came, and the seconds it took."""
    from torch.utils.data import DataLoader

    start = time.monotonic()
    loader = DataLoader(Rows(), batch_size=8, num_workers=2, multiprocessing_context=method)
    rows = [row for batch in loader for row in batch.tolist()]
    print(json.dumps([rows == list(range(64)), time.monotonic() - start]))


def pythons() -> list[str]:
    """This Python, and python3.11 … 3.15 of the PATH or beside the one this one was made from."""
    found = {Path(sys.executable).resolve(): sys.executable}
    versions = Path(sys.base_prefix).parent
    for minor in range(11, 16):
        beside = [str(path) for path in versions.glob(f"3.{minor}*/bin/python3")]
        for path in [shutil.which(f"python3.{minor}"), *beside]:
            if path and Path(path).resolve().name.startswith("python3"):
                found.setdefault(Path(path).resolve(), path)
    return list(found.values())


def main() -> None:
    ex.need_module("torch")
    seen: dict[str, list[Any]] = {}
    for python in pythons():
        child = ex.run([python, "-B", __file__, "look"])
        if child.returncode == 0:
            version, *rest = json.loads(child.stdout)
            seen.setdefault(version, rest)
    words = {True: "yes", False: "no"}
    rows = [
        (version, default, words[works], words[warned], words[threaded], words[threaded_warned])
        for version, (default, works, warned, threaded, threaded_warned) in sorted(seen.items())
    ]
    head = ("default", "forked processes work", "warns", "beside a thread: work", "warns")
    ex.table(("Python", *head), rows)
    loads: dict[str, tuple[bool, float]] = {}
    for method in METHODS:
        child = ex.run(ex.role(__file__, method))
        loads[method] = tuple(json.loads(child.stdout)) if child.returncode == 0 else (False, 0.0)
    from importlib.metadata import version as version_of

    running = sys.version.split()[0]
    print(f"torch {version_of('torch')} on Python {running}, a loader with two workers")
    ex.table(
        ("start method", "every row came", "seconds"),
        [(method, words[whole], f"{seconds:.1f}") for method, (whole, seconds) in loads.items()],
    )
    later = [minor for minor in seen if tuple(map(int, minor.split(".")[:2])) >= (3, 12)]
    if not later:
        ex.not_shown("no Python from 3.12 on is installed here")
    ex.verdict(
        {
            "fork works on every Python here": all(row[1] and row[3] for row in seen.values()),
            "fork is the default up to 3.13, not after": all(
                (row[0] == "fork") == (tuple(map(int, version.split(".")[:2])) < (3, 14))
                for version, row in seen.items()
            ),
            "torch's loader works with fork": loads["fork"][0],
        }
    )


if __name__ == "__main__":
    if sys.argv[1:] == ["look"]:
        look()
    else:
        load(sys.argv[1]) if len(sys.argv) > 1 else main()
