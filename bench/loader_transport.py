"""legroom.DataLoader against torch's: the way of a batch from a worker to the process that trains.

Covers: batches of 74 MB to 32 kB with a dataset that costs next to nothing, and one whose own work dominates.
Does not cover: ``data.batches``, which needs no workers.

Both loaders get the same dataset, two workers and torch's defaults, and take turns; the best round of each counts. The
clock starts after some batches, when the workers have started and ours have their memory, and stops with the last one,
before the workers end: what counts is an epoch's middle. Whole batches come as
arrays: a tensor that a worker sends twice is moved to shared memory once, and torch's second sending costs nothing.

    map        rows by __getitems__, stacked by the default collate
    iterable   whole batches (batch_size=None) of an IterableDataset
    work       as map, with 15 ms of work a batch

Beside them, what is left without any carrying: for large batches, two processes that stack and send nothing; for small
ones, torch's loader with a collate that stacks, into new memory every time, and returns None.
"""

from __future__ import annotations

import argparse
import multiprocessing
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
from measure import RESULTS, SOURCES, Row, alternate, as_json, in_words, machine, save, show, spreads

sys.path.insert(0, str(SOURCES))
import torch
from torch.utils.data import Dataset, IterableDataset

import legroom

ROWS = 16  # a batch
WARM = 24  # batches before the clock starts: every worker has made its slots by then
# (name, bytes of a batch, batches a round, how many times torch's)
SIZES = (("74 MB", 74_000_000, 220, 6.0), ("24 MB", 24_000_000, 450, 6.0), ("1.5 MB", 1_500_000, 2400, 5.0),
         ("32 kB", 32_000, 8000, 3.0))  # fmt: skip
WORK_S = 0.015


class Rows(Dataset[Any]):
    """Views of one tensor; asked for many at once."""

    def __init__(self, nbytes: int, batches: int, work: float = 0.0) -> None:
        self.store = torch.rand(2 * ROWS, nbytes // ROWS // 4)
        self.count, self.work = batches * ROWS, work

    def __len__(self) -> int:
        return self.count

    def __getitems__(self, indices: list[int]) -> list[Any]:
        end = time.perf_counter() + self.work
        while time.perf_counter() < end:
            pass
        return [self.store[index % (2 * ROWS)] for index in indices]


class Whole(IterableDataset[Any]):
    """Whole batches, as an array that is there already."""

    def __init__(self, nbytes: int, batches: int) -> None:
        self.store, self.batches = torch.rand(nbytes // 4).numpy(), batches

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self.batches // 2):  # in each of two workers
            yield self.store


def one_round(kind: Any, dataset: Any, **options: Any) -> Callable[[], float]:
    """Seconds a batch, over one pass."""

    def measure() -> float:
        iterator = iter(kind(dataset, num_workers=2, **options))
        for _ in range(WARM):
            next(iterator)
        start, batches = time.perf_counter(), 0
        last = start
        for _ in iterator:
            batches += 1
            last = time.perf_counter()
        return (last - start) / batches

    return measure


def bare_round(nbytes: int, batches: int) -> Callable[[], float]:
    """Seconds a batch when two processes stack rows side by side and send nothing: what memory allows."""

    def work(ready: Any) -> None:
        torch.set_num_threads(1)
        rows = list(torch.rand(2 * ROWS, nbytes // ROWS // 4)[:ROWS])
        outs = [torch.empty(ROWS, nbytes // ROWS // 4) for _ in range(3)]
        for out in outs:
            torch.stack(rows, 0, out=out)
        ready.wait()
        for number in range(batches // 2):
            torch.stack(rows, 0, out=outs[number % 3])
        ready.wait()

    def measure() -> float:
        context = multiprocessing.get_context("fork")
        ready = context.Barrier(3)
        workers = [context.Process(target=work, args=(ready,)) for _ in range(2)]
        for worker in workers:
            worker.start()
        ready.wait()
        start = time.perf_counter()
        ready.wait()
        seconds = time.perf_counter() - start
        for worker in workers:
            worker.join()
        return seconds / (batches // 2 * 2)

    return measure


def dropped(samples: list[Any]) -> None:
    """A collate that makes the batch and sends nothing."""
    torch.utils.data.default_collate(samples)


def compare(dataset: Any, rounds: int, **options: Any) -> dict[str, list[float]]:
    contenders = {
        "torch": one_round(torch.utils.data.DataLoader, dataset, **options),
        "legroom": one_round(legroom.DataLoader, dataset, **options),
    }
    return alternate(contenders, rounds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--scale", type=float, default=1.0, help="fewer batches: 0.2 for a quick look")
    parser.add_argument("--results", type=Path, default=RESULTS)
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore", "This DataLoader will create")
    where = machine("torch", "numpy")
    print(in_words(where))
    rows: list[Row] = []
    kept: dict[str, Any] = {}

    def note(name: str, nbytes: int, figures: dict[str, list[float]], target: float) -> None:
        best = {who: min(found) for who, found in figures.items()}
        ours, theirs = nbytes / best["legroom"] / 1e9, nbytes / best["torch"] / 1e9
        ratio = best["torch"] / best["legroom"]
        speeds = f"{theirs:.3g} → {ours:.3g} GB/s"
        rows.append(Row(name, ratio, "× torch's", target, at_least=True, note=speeds))
        kept[name] = {"bytes": nbytes, "rounds": figures, "seconds_a_batch": spreads(figures)}
        print(show(rows[-1:]), flush=True)

    for name, nbytes, batches, target in SIZES:
        count = max(2 * WARM, int(batches * chosen.scale))
        note(f"map, {name}", nbytes, compare(Rows(nbytes, count), chosen.rounds, batch_size=ROWS), target)
        note(f"iterable, {name}", nbytes, compare(Whole(nbytes, count), chosen.rounds, batch_size=None), target)
    for name, nbytes, batches, _ in SIZES[:2]:
        least = min(bare_round(nbytes, batches)() for _ in range(chosen.rounds))
        theirs = min(kept[f"map, {name}"]["rounds"]["torch"])
        speed = f"{nbytes / least / 1e9:.3g} GB/s"
        rows.append(Row(f"two processes that stack {name} and send nothing", theirs / least, "× torch's", note=speed))
    for name, nbytes, batches, _ in SIZES[2:]:
        empty = one_round(torch.utils.data.DataLoader, Rows(nbytes, batches), batch_size=ROWS, collate_fn=dropped)
        least = min(empty() for _ in range(chosen.rounds))
        theirs = min(kept[f"map, {name}"]["rounds"]["torch"])
        speed = f"{least * 1e6:.0f} µs per batch"
        rows.append(
            Row(f"torch's DataLoader that stacks {name} and sends nothing", theirs / least, "× torch's", note=speed)
        )
    for name, nbytes in (("1.5 MB", 1_500_000), ("32 kB", 32_000)):
        working = Rows(nbytes, max(2 * WARM, int(100 * chosen.scale)), WORK_S)
        note(f"work, {name}", nbytes, compare(working, chosen.rounds, batch_size=ROWS), 0.97)
    print()
    print(show(rows))
    body = {"machine": where, "rounds": chosen.rounds, "scale": chosen.scale, "rows": as_json(rows), "raw": kept}
    print(f"kept in {save('loader_transport', body, chosen.results)}")


if __name__ == "__main__":
    main()
