"""`legroom.tune` against exhaustive search, on three datasets: cheap, computing, waiting.

    python bench/tune.py [--json] [--rounds N] [--loader torch|legroom] [--quick]

The search runs a real loader at every workers {0,1,2,3,4,6,8} × prefetch {1,2,4}, all taking turns, and so does what
tune chose; the best of the rounds counts for each. The rule: at least 0.9 of the best throughput found, with no more
memory than that best setting takes, after less than five seconds of measuring. Memory is measured too: what the
processes hold privately and what lies in shared memory, at its peak over a run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any, Literal

from measure import Row, as_json, in_words, machine, save, show, table

WORKERS, PREFETCHES = (0, 1, 2, 3, 4, 6, 8), (1, 2, 4)
BATCH, SECONDS, ROUNDS = 16, 1.5, 3


def datasets() -> dict[str, Any]:
    import torch

    class Cheap(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """Rows of a tensor in memory."""

        def __init__(self) -> None:
            self.rows = torch.zeros(4096, 3, 64, 64)

        def __len__(self) -> int:
            return len(self.rows)

        def __getitem__(self, index: int) -> Any:
            return self.rows[index], index

    class Computing(Cheap):
        """4 ms of one core a sample."""

        def __getitem__(self, index: int) -> Any:
            until = time.thread_time() + 0.004
            while time.thread_time() < until:
                pass
            return super().__getitem__(index)

    class Waiting(Cheap):
        """4 ms of a disk or a network a sample."""

        def __getitem__(self, index: int) -> Any:
            time.sleep(0.004)
            return super().__getitem__(index)

    return {"cheap": Cheap(), "computing": Computing(), "waiting": Waiting()}


def run(dataset: Any, kind: str, workers: int, prefetch: int) -> tuple[float, int]:
    """Samples a second and the peak of memory, in a process of its own."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_run, args=(theirs, dataset, kind, workers, prefetch))
    child.start()
    rate, peak = ours.recv()
    child.join()
    return rate, peak


def _run(answer: Any, dataset: Any, kind: str, workers: int, prefetch: int) -> None:
    import torch

    import legroom

    warnings.simplefilter("ignore")  # more workers than cores is what is being tried
    torch.set_num_threads(1)
    loader_class = legroom.DataLoader if kind == "legroom" else torch.utils.data.DataLoader
    arguments: dict[str, Any] = {"batch_size": BATCH, "num_workers": workers, "shuffle": True}
    if workers:
        arguments["prefetch_factor"] = prefetch
    family = [os.getppid(), os.getpid()]
    before = _taken(family)
    peak, done = 0, threading.Event()

    def watch() -> None:
        nonlocal peak
        while not done.wait(0.25):
            peak = max(peak, _taken([*family, *_children()]))

    watcher = threading.Thread(target=watch)
    watcher.start()
    samples, started = 0, 0.0
    for batch in _forever(loader_class(dataset, **arguments)):
        if not started:
            started = time.perf_counter()
        else:
            samples += len(batch[0])
        if time.perf_counter() - started > SECONDS:
            break
    rate = samples / (time.perf_counter() - started)
    done.set()
    watcher.join()
    answer.send((rate, max(0, peak - before)))
    os._exit(0)


def _forever(loader: Any) -> Iterator[Any]:
    while True:
        yield from loader


def _children() -> list[int]:
    with open(f"/proc/{os.getpid()}/task/{os.getpid()}/children") as file:
        return [int(word) for word in file.read().split()]


def _taken(pids: list[int]) -> int:
    """Proportional shares of a whole family of forks: what they share counts once."""
    total = 0
    for pid in pids:
        try:
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) * 1024 for line in file if line.startswith("Pss:"))
        except (OSError, StopIteration):
            continue
    return total


def compare(
    name: str, dataset: Any, kind: Literal["torch", "legroom"], rounds: int, quick: bool
) -> tuple[list[Row], dict[str, Any]]:
    import legroom

    started = time.perf_counter()
    chosen = legroom.tune(dataset, batch_size=BATCH, loader=kind)
    seconds = time.perf_counter() - started
    ours = (chosen.num_workers, chosen.prefetch_factor or 1)
    grid = [(0, 1), *((workers, prefetch) for workers in WORKERS[1:] for prefetch in PREFETCHES)]
    if quick:
        grid = [(0, 1), (1, 1), (2, 1), (2, 2), (4, 1), (8, 1)]
    rates: dict[tuple[int, int], float] = {}
    peaks: dict[tuple[int, int], int] = {}
    for _ in range(rounds):
        for setting in dict.fromkeys([*grid, ours]):
            rate, peak = run(dataset, kind, *setting)
            rates[setting] = max(rates.get(setting, 0.0), rate)
            peaks[setting] = min(peaks.get(setting, sys.maxsize), peak)
    best = max(grid, key=lambda setting: rates[setting])
    note = f"tune {ours[0]} × {ours[1]}, best {best[0]} × {best[1]}"
    memory = (peaks[ours] or 1) / (peaks[best] or 1)
    rows = [
        Row(f"{name}: of the best throughput", rates[ours] / rates[best], "", 0.9, at_least=True, note=note),
        Row(f"{name}: of that setting's memory", memory, "", 1.05, note="5% for noise"),
        Row(f"{name}: time to measure", seconds, "s", 5.0),
    ]  # fmt: skip
    search = [
        {"workers": workers, "prefetch": prefetch, "samples_per_second": rate, "peak": peaks[workers, prefetch]}
        for (workers, prefetch), rate in rates.items()
    ]
    detail = {"chosen": ours, "best": best, "why": dict(chosen.why), "search": search}
    return rows, detail


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--loader", choices=["torch", "legroom"], default="torch")
    parser.add_argument("--quick", action="store_true", help="a part of the grid, for a look")
    options = parser.parse_args()
    where = machine("torch")
    rows: list[Row] = []
    details = {}
    for name, dataset in datasets().items():
        more, details[name] = compare(name, dataset, options.loader, options.rounds, options.quick)
        rows += more
    body = {"machine": where, "loader": options.loader, "rounds": options.rounds, "rows": as_json(rows), **details}
    if not options.quick:
        save(f"tune-{options.loader}", body)
    if options.json:
        print(json.dumps(body))
        return
    print(in_words(where))
    print(show(rows))
    for name, detail in details.items():
        cells = [
            (str(one["workers"]), str(one["prefetch"]), f"{one['samples_per_second']:.0f}", f"{one['peak'] >> 20}")
            for one in detail["search"]
        ]
        print(f"\n{name}\n" + table(("workers", "prefetch", "samples/s", "MB"), cells, right=(0, 1, 2, 3)))


if __name__ == "__main__":
    main()
