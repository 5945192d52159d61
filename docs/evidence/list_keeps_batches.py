"""A kept batch keeps its segment in /dev/shm, a kept view of one sample too; a clone does not.

Covers: what /dev/shm holds after 10 and after 40 batches, for four things that a loop may keep.
Does not cover: Legroom's DataLoader, whose batches are not in /dev/shm.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import experiment as ex

FIRST, LAST, SAMPLES = 10, 40, 64
SAMPLE = 64 * 1024  # bytes


class Samples:
    def __len__(self) -> int:
        return LAST * SAMPLES

    def __getitem__(self, index: int) -> Any:
        import torch

        return torch.ones(SAMPLE, dtype=torch.uint8)


def used() -> int:
    space = os.statvfs("/dev/shm")
    return (space.f_blocks - space.f_bfree) * space.f_frsize


def per_batch(keep: Callable[[Any], Any]) -> float:
    """Bytes of /dev/shm per batch, between the two readings."""
    from torch.utils.data import DataLoader

    kept, before = [], 0
    dataset: Any = Samples()
    for number, batch in enumerate(DataLoader(dataset, batch_size=SAMPLES, num_workers=1), 1):
        kept.append(keep(batch))
        if number == FIRST:
            before = used()
        if number == LAST:
            return (used() - before) / (LAST - FIRST)
    raise AssertionError("the loader ended early")


def main() -> None:
    ex.need_module("torch")
    space = os.statvfs("/dev/shm")
    if space.f_bavail * space.f_frsize < 3 * LAST * SAMPLES * SAMPLE:
        ex.not_shown("/dev/shm is too small for 40 kept batches")
    ways: list[tuple[str, Callable[[Any], Any]]] = [
        ("nothing", lambda batch: None),
        ("the batch", lambda batch: batch),
        ("a view of one sample", lambda batch: batch[0]),
        ("a clone of one sample", lambda batch: batch[0].clone()),
    ]
    found = {name: per_batch(keep) / ex.MB for name, keep in ways}
    ex.table(
        ("what the loop keeps", "MiB of /dev/shm per batch"), [(name, f"{rate:.1f}") for name, rate in found.items()]
    )
    nothing, whole, view, clone = found.values()
    ex.verdict(
        {
            "a batch keeps its 4 MiB": whole > 3,
            "a view of one sample keeps all of it": view > 3,
            "nothing grows by itself": nothing < 1,
            "a clone keeps nothing of it": clone < 1,
        }
    )


if __name__ == "__main__":
    main()
