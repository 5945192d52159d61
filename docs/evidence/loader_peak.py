"""torch's loader holds up to workers × prefetch + 2 batches in /dev/shm, and every tensor takes whole pages.

Covers: the peak for three settings, in one epoch and over several, with and without persistent workers; the bytes of
one tensor under each sharing strategy, a batch of 50 small tensors, a batch of numpy arrays. Does not cover: batches
that the consumer keeps (they come on top).
"""

from __future__ import annotations

import json
import mmap
import sys
import time
from collections.abc import Callable
from pathlib import Path

import experiment as ex
import rigs

BATCH = 8 * ex.MB
STRATEGIES = ("file_descriptor", "file_system")
SETTINGS = ((1, 2), (2, 2), (4, 2))
PAGE = mmap.PAGESIZE
SIZES = (20, PAGE - 64, PAGE - 63, PAGE, PAGE + 1)


def settle() -> None:
    """A training step so long that the workers run ahead as far as they may."""
    since, last = time.monotonic(), ex.shm_used()
    while time.monotonic() - since < 0.1:
        time.sleep(0.01)
        if (now := ex.shm_used()) != last or not ex.children_wait():
            since, last = time.monotonic(), now


def peak(
    collate: Callable[[object], object], workers: int, prefetch: int, epochs: int = 1, *, persistent: bool = False
) -> int:
    """The most that so many passes took from /dev/shm, the loop's variable living on from one to the next."""
    from torch.utils.data import DataLoader

    loader = DataLoader(
        range(workers * prefetch + 3), 1, num_workers=workers, prefetch_factor=prefetch, collate_fn=collate,
        persistent_workers=persistent,
    )  # fmt: skip
    with ex.ShmPeak() as shm:
        for _ in range(epochs):
            for _batch in loader:
                settle()
    return shm.most


def inside() -> None:
    import numpy
    import torch

    torch.set_num_threads(1)
    kept = [torch.ones(5).share_memory_() for _ in range(50)]
    small = ex.shm_used(), sum(tensor.nbytes for tensor in kept)
    pages = []
    for strategy in STRATEGIES:
        torch.multiprocessing.set_sharing_strategy(strategy)
        for nbytes in SIZES:
            before = ex.shm_used()
            kept.append(torch.ones(nbytes, dtype=torch.uint8).share_memory_())
            pages.append((strategy, nbytes, (ex.shm_used() - before) // PAGE))
    torch.multiprocessing.set_sharing_strategy(STRATEGIES[0])  # the default on Linux
    large = torch.ones(BATCH, dtype=torch.uint8)
    peaks = [(w, p, peak(lambda _: large.clone().share_memory_(), w, p)) for w, p in SETTINGS]
    again = [peak(lambda _: large.clone().share_memory_(), 2, 2, 3, persistent=kept) for kept in (False, True)]
    arrays = peak(lambda _: numpy.ones(BATCH, dtype=numpy.uint8), 2, 2)
    held = iter(torch.utils.data.DataLoader(range(8), num_workers=2))  # to count its semaphores
    semaphores = Path("/proc/self/maps").read_text().count("/dev/shm/sem.")
    del held
    print(
        json.dumps(
            {"peaks": peaks, "again": again, "numpy": arrays, "small": small, "pages": pages, "semaphores": semaphores}
        )
    )


def main() -> None:
    ex.need("mount")
    ex.need_module("torch")
    child = ex.run(rigs.small_shm(ex.role(__file__, "inside"), "1g"))
    if child.returncode:
        raise SystemExit(child.stderr)
    found = json.loads(child.stdout)
    peaks = [(w, p, size / BATCH) for w, p, size in found["peaks"]]
    ex.table(
        ("workers", "prefetch", "peak, in batches of 8 MiB", "workers × prefetch + 1 … 2"),
        [(w, p, f"{size:.2f}", f"{w * p + 1} … {w * p + 2}") for w, p, size in peaks],
    )
    anew, living = (size / BATCH for size in found["again"])
    print(f"three epochs of 2 × 2: {anew:.2f} batches, with persistent workers {living:.2f}\n")
    taken = {(strategy, nbytes): pages for strategy, nbytes, pages in found["pages"]}
    head = ("one tensor of", *(f"pages with {way}" for way in STRATEGIES))
    ex.table(head, [(f"{size} B", *(taken[way, size] for way in STRATEGIES)) for size in SIZES])
    small, own = found["small"]
    print(f"a batch of 50 tensors of 20 B takes {small} B: {small / own:.0f} times its own {own} B")
    arrays, semaphores = found["numpy"] // PAGE, found["semaphores"]
    print(f"batches of 8 MiB of numpy arrays take {arrays} pages; such a loader has {semaphores} semaphores\n")
    room = 40 * PAGE / BATCH  # the semaphores of the largest of these loaders, a page each
    ex.verdict(
        {
            "peaks of w × p + 1 … 2": all(w * p + 1 <= size <= w * p + 2 + room for w, p, size in peaks),
            "workers started anew hold one batch more": 2 * 2 + 2 <= anew <= 2 * 2 + 3 + 2 * room,
            "persistent workers do not": living <= 2 * 2 + 2 + room,
            "file_system: 64 bytes of header": [taken[STRATEGIES[1], size] for size in SIZES] == [1, 1, 2, 2, 2],
            "file_descriptor: no header": [taken[STRATEGIES[0], size] for size in SIZES] == [1, 1, 1, 1, 2],
            "small tensors take a page each": small == 50 * PAGE,
            "numpy arrays take none beside the semaphores": arrays <= semaphores,
        }
    )


if __name__ == "__main__":
    inside() if len(sys.argv) > 1 else main()
