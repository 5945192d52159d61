"""``data.batches`` on the CPU, side by side with a bare gather and with torch's DataLoader.

Covers: random batches of 196 kB images from shared memory, to a consumer that does nothing and to one that works.
Does not cover: CUDA, disks, datasets that do work of their own.

    python bench/loader_batches.py [--rounds 9] [--scale 1.0] [--results DIR]

Nothing is asserted: a target that is missed is printed as missed.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

import legroom
from cache_rig import Bench
from legroom.loader.batches import batch_iterator
from legroom.loader.rank_sampler import permutation
from measure import RESULTS, Row, alternate, as_json, best, in_words, machine, places, save, show, spreads

PAGE = 4096


def aligned(shape: tuple[int, ...]) -> np.ndarray[Any, Any]:
    """An array of bytes that begins on a page."""
    size = int(np.prod(shape))
    block = np.empty(size + PAGE, np.uint8)
    start = -block.ctypes.data % PAGE
    return block[start : start + size].reshape(shape)


def bare(images: np.ndarray[Any, Any], size: int, buffers: int) -> Callable[[], float]:
    """Nothing but the gather, into buffers taken in turn."""
    outs = [aligned((size, *images.shape[1:])) for _ in range(buffers)]
    order = permutation(len(images), 0, 0)
    rows = [order[at : at + size] for at in range(0, len(order) - size + 1, size)]

    def work() -> float:
        start = time.perf_counter()
        for number, chosen in enumerate(rows):
            np.take(images, chosen, axis=0, out=outs[number % buffers], mode="clip")
        return (time.perf_counter() - start) / len(rows)

    return work


def looped(make: Callable[[], Iterable[Any]], consume: Callable[[], object] | None = None) -> Callable[[], float]:
    """Seconds a batch of a loop, its start included."""

    def work() -> float:
        loop = make()
        count, start = 0, time.perf_counter()
        for _batch in loop:
            count += 1
            if consume is not None:
                consume()
        return (time.perf_counter() - start) / count

    return work


class Direct(batch_iterator.Prefetcher):
    """In its place: no thread, ever."""

    def begin(self, rows: object) -> None: ...


def without_thread(work: Callable[[], float]) -> Callable[[], float]:
    """The same with prefetching switched off."""

    def direct() -> float:
        usual = batch_iterator.Prefetcher
        batch_iterator.Prefetcher = Direct  # type: ignore[misc]
        try:
            return work()
        finally:
            batch_iterator.Prefetcher = usual  # type: ignore[misc]

    return direct


def measure(bench: Bench, size: int) -> tuple[list[Row], dict[str, Any]]:
    """One batch size."""
    data = legroom.open(bench.file(300, "images"))
    data.ready()
    images = data["images"]
    tensor = torch.from_numpy(images.copy())
    steps = [torch.randn(300, 300)]

    def busy() -> object:
        # About as long as the gather of 12 MB, on one core.
        return steps[0] @ steps[0]

    torch.set_num_threads(1)
    ours = lambda: data.batches(size, shuffle=True, drop_last=True)  # noqa: E731

    def theirs(workers: int) -> DataLoader[Any]:
        return DataLoader(TensorDataset(tensor), batch_size=size, shuffle=True, drop_last=True, num_workers=workers)

    figures = alternate(
        {
            "bare": bare(images, size, 1),
            "bare2": bare(images, size, 2),
            "ours": looped(ours),
            "torch0": looped(lambda: theirs(0)),
            "torch2": looped(lambda: theirs(2)),
            "busy": looped(ours, busy),
            "busy-direct": without_thread(looped(ours, busy)),
        },
        bench.rounds,
    )
    least = best(figures)
    rate = size * images[0].nbytes / 1e9
    name = f"batches of {size} ({size * images[0].nbytes / 1e6:.1f} MB)"
    rows = [
        Row(f"{name}: np.take(out=), one buffer", rate / least["bare"], "GB/s"),
        Row("  np.take(out=), two buffers in turn", rate / least["bare2"], "GB/s"),
        Row("  data.batches", rate / least["ours"], "GB/s"),
        Row("  of the bare gather", least["bare"] / least["ours"], "×", 0.85, True),
        Row("  of the bare gather into two buffers", least["bare2"] / least["ours"], "×"),
        Row("  of torch's DataLoader, 0 workers", least["torch0"] / least["ours"], "×", 1.4, True),
        Row("  the bare gather itself, of torch's DataLoader, 0 workers", least["torch0"] / least["bare"], "×"),
        Row("  of torch's DataLoader, 2 workers", least["torch2"] / least["ours"], "×", 8, True),
        Row("  busy consumer: with prefetching, of without", least["busy-direct"] / least["busy"], "×"),
    ]
    data.close()
    return rows, {"seconds_a_batch": spreads(figures)}


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=9)
    options.add_argument("--scale", type=float, default=1.0, help="of the data, to see that it runs")
    options.add_argument("--results", type=Path, default=RESULTS)
    given = options.parse_args()
    where = machine("numpy", "torch")
    print(in_words(where))
    parts = {}
    for size in (64, 8):
        with places() as (memory, disk):
            rows, raw = measure(Bench(memory, disk, given.rounds, given.scale), size)
        parts[str(size)] = {"rows": as_json(rows), "raw": raw}
        print(f"\n{show(rows)}", flush=True)
    body = {"machine": where, "rounds": given.rounds, "scale": given.scale, "parts": parts}
    print(f"\nkept in {save('loader_batches', body, given.results)}")


if __name__ == "__main__":
    main()
