"""The DataLoader script of the demo: whether a loader survives in this /dev/shm, and how fast it is.

`trial` makes float batches, as scripts that normalise do, with whatever torch.utils.data.DataLoader is: torch's own,
or Legroom's by `legroom run --loader legroom`. `speed` moves the rows as they are: by torch's DataLoader, by Legroom's
with the same workers, and by data.batches without workers.
"""

from __future__ import annotations

import json
import signal
import sys
import time
from collections.abc import Callable, Generator
from functools import partial
from types import SimpleNamespace
from typing import Any

from legroom.demo.demo_child import end_with_parent, send

WORKERS = 2
_WARM_UP = 12  # batches before the clock starts: the workers run and have their memory
_EPOCH = 4000  # batches, so that no epoch ends and no worker starts while the clock runs
_STEP = (
    0.25  # seconds of a training step: slower than the workers on a busy machine too, so that batches queue
)


def _worker(_number: int) -> None:
    end_with_parent(signal.SIGKILL)


# Forked whatever this Python's default is: the parent of a worker is then the process that started it.
_WORKERS: dict[str, Any] = {
    "num_workers": WORKERS,
    "multiprocessing_context": "fork",
    "worker_init_fn": _worker,
}


def main() -> None:
    """Do what the first argument says."""
    end_with_parent(signal.SIGKILL)
    options = SimpleNamespace(**json.loads(sys.argv[1]))
    tell = partial(send, options.messages)
    tell("started")
    import torch

    import legroom

    torch.set_num_threads(1)
    data = legroom.open(options.data, backing="inplace")  # no cache entry: the training runs shall find none
    data.ready()
    (_trial if options.what == "trial" else _speed)(options, data, tell)


def _trial(options: SimpleNamespace, data: Any, tell: Any) -> None:
    from torch.utils.data import DataLoader

    rows: Any = Rows(data, options.batch * options.batches, as_float=True)
    loader = DataLoader(rows, batch_size=options.batch, **_WORKERS)
    tell("opened", loader=type(loader).__module__.partition(".")[0])
    for number, _ in enumerate(loader, 1):
        tell("step", step=number, of=options.batches)
        time.sleep(_STEP)
    tell("done", step=options.batches, of=options.batches)


def _speed(options: SimpleNamespace, data: Any, tell: Any) -> None:
    """Batches per second of each loader, in turns: other work on the machine slows all of them."""
    from torch.utils.data import DataLoader

    import legroom

    rows: Any = Rows(data, options.batch * _EPOCH, as_float=False)
    settings: dict[str, Any] = {"batch_size": options.batch, "shuffle": True, **_WORKERS}
    loaders: dict[str, Callable[[], Any]] = {
        "torch": lambda: DataLoader(rows, **settings),
        "legroom": lambda: legroom.DataLoader(rows, **settings),
        "batches": lambda: data.batches(options.batch, shuffle=True),
    }
    turns = [name for _ in range(options.rounds) for name in loaders]
    for number, name in enumerate(turns, 1):
        tell("rate", loader=name, rate=_rate(loaders[name](), options.seconds))
        tell("step", step=number, of=len(turns))
    tell("done", step=len(turns), of=len(turns))


def _rate(loader: Any, seconds: float) -> float:
    batches = _endless(loader)
    for _ in range(_WARM_UP):
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
    """A map-style dataset of (image, label); after the last row it begins again."""

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


if __name__ == "__main__":
    main()
