"""A data loader at work, as a program of its own: whether it lives in this /dev/shm, and how fast it is.

Covers: an ordinary script around torch's DataLoader with workers (`trial`: run as it is, or by `legroom run --loader
legroom` with ours in its place); three ways to the same batches in turns (`speed`). Does not cover:
judging (loaders.py).

`trial` makes float batches, as scripts that normalise do. `speed` moves the rows as they are: the same bytes by torch's
loader, by ours with the same workers, and by data.batches without any.
"""

from __future__ import annotations

import argparse
import signal
import time
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

from legroom.demo.said import Mouth
from legroom.demo.tether import tether, worker

WORKERS = 2
# Forked, whatever this Python's default is: a worker is on a tether to the process that it shares its data with.
_WORKERS: dict[str, Any] = {
    "num_workers": WORKERS,
    "multiprocessing_context": "fork",
    "worker_init_fn": worker,
}
_WARM = 12  # batches before the clock starts: workers have started and have their memory
_PLENTY = 4000  # batches of an epoch, so that none ends, and no workers start anew, while the clock runs
_CONSUME = 0.05  # seconds a training would take over a large batch


def main() -> None:
    """Do what was asked for, saying so."""
    tether(signal.SIGKILL)
    options = _options()
    mouth = Mouth(options.said)
    mouth.say("begun")
    import torch

    import legroom

    torch.set_num_threads(1)
    data = legroom.open(options.data, backing="inplace")  # no entry: the trainings shall find none
    data.ready()
    if options.what == "trial":
        _trial(options, data, mouth)
    else:
        _speed(options, data, mouth)


def _trial(options: argparse.Namespace, data: Any, mouth: Mouth) -> None:
    """So many large batches through whatever torch.utils.data.DataLoader is here."""
    from torch.utils.data import DataLoader

    rows: Any = Rows(data, options.batch * options.batches, as_float=True)
    loader = DataLoader(rows, batch_size=options.batch, **_WORKERS)
    mouth.say("opened", loader=type(loader).__module__.partition(".")[0])
    delivered = 0
    for _ in loader:
        delivered += 1
        mouth.say("step", step=delivered, of=options.batches)
        time.sleep(_CONSUME)
    mouth.say("done", step=delivered, of=options.batches)


def _speed(options: argparse.Namespace, data: Any, mouth: Mouth) -> None:
    """Batches a second of each way, in turns, so that whatever else the machine does falls on all of them."""
    from torch.utils.data import DataLoader

    import legroom

    rows: Any = Rows(data, options.batch * _PLENTY, as_float=False)
    settings: dict[str, Any] = {"batch_size": options.batch, "shuffle": True, **_WORKERS}
    ways: dict[str, Callable[[], Any]] = {
        "torch": lambda: DataLoader(rows, **settings),
        "legroom": lambda: legroom.DataLoader(rows, **settings),
        "batches": lambda: data.batches(options.batch, shuffle=True),
    }
    done, rounds = 0, options.rounds * len(ways)
    for _ in range(options.rounds):
        for name, make in ways.items():
            rate = _rate(make(), options.seconds)
            done += 1
            mouth.say("rate", way=name, rate=rate)
            mouth.say("step", step=done, of=rounds)
    mouth.say("done", step=done, of=rounds)


def _rate(loader: Any, seconds: float) -> float:
    """Batches a second over so long, epoch after epoch."""
    batches = _endless(loader)
    for _ in range(_WARM):
        next(batches)
    count, began = 0, time.perf_counter()
    while time.perf_counter() - began < seconds:
        next(batches)
        count += 1
    rate = count / (time.perf_counter() - began)
    batches.close()
    return rate


def _endless(loader: Any) -> Generator[Any, None, None]:
    while True:
        yield from loader


class Rows:
    """A map-style dataset of (image, label) on mapped data; begins again where they end."""

    def __init__(self, data: Any, count: int, *, as_float: bool) -> None:
        tensors = data.tensors()
        self._images, self._labels = tensors["images"], tensors["labels"]
        self._count, self._as_float = count, as_float

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[Any, Any]:
        at = index % len(self._labels)
        image = self._images[at]
        return (image.float() / 255 if self._as_float else image), self._labels[at]


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="legroom.demo.loading", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=("trial", "speed"))
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--said", type=Path, required=True, help="where to say how it goes")
    parser.add_argument("--batch", type=int, required=True)
    parser.add_argument("--batches", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=1.0, help="of measuring, each way and round")
    return parser.parse_args()


if __name__ == "__main__":
    main()
