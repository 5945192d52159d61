"""The contenders of the GPU benchmark.

Covers: the link, the card's own memory, torch's loader, and every path of ours. Does not cover: taking turns and
keeping figures (gpu_loader_rig.py).
"""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, Dataset, RandomSampler

import legroom
from gpu_loader_rig import DEVICE, ROW, Bench, Contender, clocked, epochs, loop, on_path, repeated
from legroom.gpu.cuda_driver_api import CudaRefused
from legroom.loader.batches.batch_settings import CUDA_PATHS
from legroom.loader.batches.cuda_calls_for_gather import Driver, open_driver

SIZES = (64, 256, 1024)
CARD_SIZES = (*SIZES, 2048)
GB = 1 << 30
REGISTERED = ("cuda-copy-engine", "cuda-kernel", "cuda-registered")


def link(bench: Bench) -> None:
    """Registered memory against the link."""
    for size in SIZES:
        bench.take_turns(
            f"link {size}",
            {
                "pinned H2D": partial(_h2d, size),
                "index_select": partial(_batches, bench, size, "cuda-registered", 4 * GB),
                "copy engines": partial(_batches, bench, size, "cuda-copy-engine", 4 * GB),
                "kernel": partial(_batches, bench, size, "cuda-kernel", 4 * GB),
                "bare index_select": partial(_bare, bench, size),
            },
        )


def loaders(bench: Bench) -> None:
    """torch's loader on the same data."""
    for size, count in ((64, 240), (256, 100)):
        bench.take_turns(f"torch {size}", {"DataLoader, 8 workers": partial(_torchs, bench, size, count)})


def card(bench: Bench) -> None:
    """Arrays on the card against a copy on the card."""
    for size in CARD_SIZES:
        bench.take_turns(
            f"card {size}",
            {
                "D2D copy": partial(_d2d, bench, size),
                "batches": partial(_batches, bench, size, "cuda-resident", 64 * GB, resident=True),
            },
        )


def staged(bench: Bench) -> None:
    """Entries on disk (in the page cache), and what is left when nothing can be page-locked."""
    bench.take_turns(
        "staged 256",
        {
            "pinned buffers": partial(_batches, bench, 256, "cuda-pinned", 4 * GB, backing="disk"),
            "plain copies": partial(_unlocked, bench),
        },
    )


def odd(bench: Bench) -> None:
    """Rows that divide by no wider integer than one, two or four bytes."""
    for width in (1, 2, 4):
        bench.take_turns(
            f"width {width}",
            {"kernel": partial(_batches, bench, 256, "cuda-kernel", 2 * GB, row=ROW - width, rows=1024)},
        )


def registering(bench: Bench) -> None:
    """Seconds a GB, and until the first batch of data that are registered already."""
    driver = open_driver(DEVICE)
    path = Path("/dev/shm") / f"legroom-bench-{os.getpid()}"
    try:
        np.memmap(path, np.uint8, "w+", shape=(GB,))[:] = 1
        with path.open("rb") as file:
            shared = mmap.mmap(file.fileno(), 0, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ)
        address = np.frombuffer(shared, np.uint8).ctypes.data
        bench.notes["register_s_per_GB"] = _seconds(lambda: driver.register(address, GB))
        bench.notes["unregister_s_per_GB"] = _seconds(lambda: driver.unregister(address))
    finally:
        path.unlink(missing_ok=True)
    held = bench.data().batches(64, device="cuda", keys="images")
    with legroom.open(bench.source(), backing="shm") as data:
        data.ready()
        bench.notes["first_batch_of_registered_s"] = min(
            _seconds(lambda: next(iter(data.batches(64, device="cuda", keys="images")))) for _ in range(bench.rounds)
        )
    on_path(held, "cuda-copy-engine")  # in file order


def overlap(bench: Bench) -> None:
    """A step that computes about as long as its batch takes to come, on each path."""
    bench.notes["overlap_step_s"] = {path: _overlap(bench, path) for path in REGISTERED}


def _overlap(bench: Bench, path: str) -> dict[str, float]:
    batches = bench.data().batches(256, shuffle=True, device="cuda", keys="images", path=path)
    matrix = torch.rand(4096, 4096, device=DEVICE, dtype=torch.bfloat16)

    def compute(repeat: int) -> None:
        for _ in range(repeat):
            torch.mm(matrix, matrix)

    def a_step(work: Callable[[], object]) -> float:
        work()
        return min(_seconds(work) for _ in range(bench.rounds)) / len(batches)

    def both(repeat: int, wait: bool) -> None:
        for _ in batches:
            compute(repeat)
            if wait:
                torch.cuda.synchronize()  # as loss.item() does

    gather = a_step(lambda: epochs(batches, 1))
    repeat = max(1, round(gather / a_step(lambda: compute(len(batches)))))
    alone = a_step(lambda: compute(repeat * len(batches)))
    together = a_step(lambda: both(repeat, False))
    return {
        "gather alone": gather,
        "compute alone": alone,
        "both": together,
        "both : longer": together / max(gather, alone),
        "both, waiting for every step": a_step(lambda: both(repeat, True)),
    }


def right(bench: Bench) -> None:
    """The rows of one epoch are those of the CPU's batches, on every path."""
    for path in (*REGISTERED, "cuda-resident", "cuda-pinned"):
        data = bench.data("disk" if path == "cuda-pinned" else "shm")
        options: dict[str, Any] = {"resident": True} if path == "cuda-resident" else {"path": path}
        ours = on_path(data.batches(256, shuffle=True, epoch=1, device="cuda", **options), path)
        theirs = data.batches(256, shuffle=True, epoch=1)
        bench.notes[f"{path} equal to cpu"] = all(
            torch.equal(batch[name].cpu(), expected[name])
            for batch, expected in zip(ours, theirs, strict=True)
            for name in expected
        )


def _batches(
    bench: Bench,
    size: int,
    path: str,
    total: int,
    *,
    backing: str = "shm",
    row: int = ROW,
    rows: int | None = None,
    resident: bool = False,
) -> Contender:
    data = bench.data(backing, row, rows)
    given = path if path in CUDA_PATHS and backing == "shm" else None
    batches = data.batches(size, shuffle=True, device="cuda", keys="images", resident=resident, path=given)
    return loop(batches, path, total)


def _h2d(size: int) -> Contender:
    """One pinned buffer copied to the card again and again: the speed of the link."""
    pinned = torch.empty(size * ROW, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(size * ROW, dtype=torch.uint8, device=DEVICE)
    return repeated(4 * GB, lambda _: there.copy_(pinned, non_blocking=True).nbytes)


def _bare(bench: Bench, size: int) -> Contender:
    """index_select from registered memory and nothing around it: what a loop could at most give."""
    batches = on_path(
        bench.data().batches(size, device="cuda", keys="images", path="cuda-registered"), "cuda-registered"
    )
    source = batches._gatherer._sources["images"]
    chosen = [torch.randperm(len(source), device=DEVICE)[:size] for _ in range(8)]
    out = torch.empty((size, source.shape[1]), dtype=source.dtype, device=DEVICE)

    def gather(
        number: int, _: object = batches
    ) -> int:  # the batches are an argument so that the memory stays registered
        return torch.index_select(source, 0, chosen[number % 8], out=out).nbytes

    return repeated(4 * GB, gather)


def _d2d(bench: Bench, size: int) -> Contender:
    """Slices of the array on the card, copied on the card; other slices each time, or its cache would answer."""
    data = bench.data()
    batches = on_path(data.batches(size, device="cuda", keys="images", resident=True), "cuda-resident")
    source = batches._gatherer._uses["images"].resource.words
    out = torch.empty((size, source.shape[1]), dtype=source.dtype, device=DEVICE)
    starts = max(1, len(source) - size)

    def step(number: int) -> int:
        start = number * 7919 % starts
        return out.copy_(source[start : start + size]).nbytes

    return repeated(64 * GB, step)


class _Preloaded(Dataset[torch.Tensor]):
    """What people write: the whole array as a tensor, one row at a time."""

    def __init__(self, images: Any) -> None:
        self.images = torch.from_numpy(images)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, row: int) -> torch.Tensor:
        return self.images[row]


def _torchs(bench: Bench, size: int, count: int) -> Contender:
    """torch's loader with 8 workers and pinned memory; the clock starts when every worker has its queue full."""
    dataset = _Preloaded(bench.data()["images"])
    before = 2 * 8 * 2  # workers × prefetch, twice

    def work() -> float:
        sampler = RandomSampler(dataset, replacement=True, num_samples=size * (before + count))
        batches = iter(DataLoader(dataset, size, sampler=sampler, num_workers=8, pin_memory=True))
        for _ in range(before):
            next(batches).to(DEVICE, non_blocking=True)
        return clocked(lambda: sum(batch.to(DEVICE, non_blocking=True).nbytes for batch in batches))

    return work


def _unlocked(bench: Bench) -> Contender:
    with _refusing("pinned"):
        batches = bench.data("disk").batches(256, shuffle=True, device="cuda", keys="images")
    return loop(batches, "cuda-copy", 2 * GB)


@contextmanager
def _refusing(name: str) -> Iterator[None]:
    """CUDA refuses one thing for a while."""

    def refuse(*_: object) -> None:
        raise CudaRefused("refused by the benchmark")

    before = getattr(Driver, name)
    setattr(Driver, name, refuse)
    try:
        yield
    finally:
        setattr(Driver, name, before)


def _seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - start
