"""Training loops for test_real_dataloader.py to run in rigs: ``python loader_player.py NAME JSON``; prints one JSON object."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import Dataset, IterableDataset

import legroom
from legroom.loader.dataloader import receive

MB = 1 << 20
warnings.filterwarnings("ignore", "This DataLoader will create")
warnings.filterwarnings("ignore", ".*multi-threaded, use of fork")


class Images(Dataset[Any]):
    """Batches of ``batch`` rows are ``megabytes`` large; row i is full of i."""

    def __init__(self, megabytes: float, count: int, batch: int = 4) -> None:
        self.floats, self.count = int(megabytes * MB / 4 / batch), count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, i: int) -> Any:
        return torch.full((self.floats,), float(i)), i


class Deadly(Images):
    def __init__(self, number: int, hog: bool = False) -> None:
        super().__init__(1, 400)
        self.number, self.hog = number, hog

    def __getitem__(self, i: int) -> Any:
        if i == 4:
            time.sleep(1)  # let the first batch arrive
        if i == 4 and self.hog:
            hogged = bytearray()
            while True:
                hogged += bytes(8 * MB)
        if i == 4 and self.number:
            os.kill(os.getpid(), self.number)
        return super().__getitem__(i)


class Plain(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        for i in range(40):
            yield torch.full((1000,), float(i))


def by_default(samples: list[Any]) -> Any:
    return torch.utils.data.default_collate(samples)


def shm() -> int:
    stats = os.statvfs("/dev/shm")
    return (stats.f_blocks - stats.f_bfree) * stats.f_frsize


class Watch:
    """The most that lay in /dev/shm."""

    def __enter__(self) -> Watch:
        self.peak, self._over = 0, threading.Event()
        self._thread = threading.Thread(target=self._look)
        self._thread.start()
        return self

    def _look(self) -> None:
        while not self._over.is_set():
            self.peak = max(self.peak, shm())
            time.sleep(0.002)

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()


def right(loader: Any, batch: int = 4, keep: bool = False) -> dict[str, Any]:
    """Whether every batch is what it should be."""
    kept, seen, good = [], 0, True
    with Watch() as watch:
        for rows, indices in loader:
            expected = torch.arange(seen, seen + len(indices))
            good = good and bool((indices == expected).all()) and bool((rows == expected[:, None]).all())
            seen += len(indices)
            if keep:
                kept.append((rows, indices))
    good = good and all(bool((rows == indices[:, None]).all()) for rows, indices in kept)
    return {"good": good, "seen": seen, "peak": watch.peak}


def epoch(which: str, megabytes: float, count: int, keep: bool = False, **options: Any) -> dict[str, Any]:
    kind = legroom.DataLoader if which == "legroom" else torch.utils.data.DataLoader
    if options.pop("own_collate", False):
        options["collate_fn"] = by_default
    loader = kind(Images(megabytes, count), 4, **options)
    try:
        return {**right(loader, keep=keep), "transport": getattr(loader, "transport", None)}
    except RuntimeError as problem:
        return {"failed": str(problem)[-400:]}


def death(number: int, hog: bool = False, busy: bool = False) -> dict[str, Any]:
    """A worker dies; how long until it is said, and what."""
    started = time.monotonic()
    try:
        for _ in legroom.DataLoader(Deadly(number, hog), 4, num_workers=2):
            started = time.monotonic()
            if busy:
                time.sleep(30)  # the worker dies in the middle of the training step
    except RuntimeError as problem:
        return {"kind": type(problem).__name__, "text": str(problem), "after": time.monotonic() - started,
                "cause": str(problem.__cause__)}  # fmt: skip
    return {}


def forever() -> None:
    """Trains until it is interrupted; says who it is first."""
    loader = legroom.DataLoader(Images(4, 100_000), 4, num_workers=2)
    for number, (rows, _) in enumerate(loader):
        if number == 3:
            pids = list(receive._workers)
            print(json.dumps({"workers": pids}), flush=True)
        time.sleep(0.01)
        del rows


def with_accelerate() -> dict[str, Any]:
    from accelerate import Accelerator

    loader = Accelerator(cpu=True).prepare(legroom.DataLoader(Images(24, 48), 4, num_workers=2))
    return {**right(loader), "class": type(loader).__name__}


def with_lightning() -> dict[str, Any]:
    import logging

    import lightning

    logging.getLogger("lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    seen: list[int] = []
    good: list[bool] = []
    kinds: set[str] = set()

    class Model(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(1, 1)

        def training_step(self, batch: Any, _: int) -> Any:
            rows, indices = batch
            kinds.add(type(self.trainer.train_dataloader).__module__)
            good.append(bool((rows == indices[:, None]).all()))
            seen.extend(indices.tolist())
            return self.layer(rows[:, :1] / 100).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), 1e-6)

    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", devices=1, logger=False, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, barebones=False,
    )  # fmt: skip
    with Watch() as watch:
        trainer.fit(Model(), legroom.DataLoader(Images(24, 48), 4, shuffle=True, num_workers=2))
    # What Lightning does where it brings a sampler of its own: the class is made again from its attributes.
    from lightning.pytorch.utilities.data import _update_dataloader

    loader = legroom.DataLoader(Images(1, 8), 4, num_workers=1, memory_budget="64MB", pin_memory=False)
    again = _update_dataloader(loader, torch.utils.data.SequentialSampler(range(8)))
    return {
        "good": all(good), "seen": len(set(seen)), "peak": watch.peak, "kinds": sorted(kinds), "again": again.transport,
        "class": type(again) is legroom.DataLoader, "budget": again.memory_budget, "rest": right(again),
    }  # fmt: skip


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.default_int_handler)
    found = globals()[sys.argv[1]](**json.loads(sys.argv[2]))
    if found is not None:
        print(json.dumps(found))
