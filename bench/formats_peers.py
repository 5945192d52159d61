"""Batches from the files people have: Legroom and the loop that each format's own users write, in one process.

Covers: windows of a flat token file of uint16, in the page cache. nanoGPT's loop over a memmap makes int64 tensors of
inputs and targets. A bare `numpy.take` copies rows of inputs alone into one buffer, from the memmap and from the shared
copy, whose pages are smaller. `data.batches` makes inputs and targets in one tensor, as stored and with `.long()`.
Does not cover: cold disks, GPUs.

    python bench/formats_peers.py [--tokens 100000000] [--rounds 9]

The contenders take turns and use the CPU time of their thread, so that other programs on the machine count little; the
best of the rounds counts. Nothing is kept: only ratios travel from machine to machine.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch

import legroom
from measure import Row, alternate, best, in_words, machine, places, show

SIZES = [(12, 1024), (64, 1024), (64, 4096), (256, 2048)]  # batch_size, sequence_length
STEPS = 100


def by_nanogpt(tokens: np.ndarray, length: int, starts: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.stack([torch.from_numpy(tokens[at : at + length].astype(np.int64)) for at in starts])
    targets = torch.stack([torch.from_numpy(tokens[at + 1 : at + 1 + length].astype(np.int64)) for at in starts])
    return inputs, targets


def seconds(work: Callable[[int], object]) -> float:
    """CPU seconds of this thread for a batch."""
    start = time.thread_time()
    for step in range(STEPS):
        work(step)
    return (time.thread_time() - start) / STEPS


def token_batches(path: Path, batch_size: int, length: int, rounds: int) -> list[Row]:
    """How many times as fast as each of the other two."""
    flat = np.memmap(path, np.uint16, "r")
    rows = np.random.default_rng(1).integers(0, (len(flat) - 1) // length, (STEPS, batch_size))
    end = (len(flat) - 1) // length * length
    mapped, buffer = flat[:end].reshape(-1, length), np.empty((batch_size, length), np.uint16)
    with legroom.open(path, dtype="uint16") as data:
        data.ready()
        shared = data["tokens"][:end].reshape(-1, length)
        batches = data.batches(batch_size, sequence_length=length, shuffle=True)
        first = np.concatenate([batch["tokens"].numpy() for batch in data.batches(8, sequence_length=length)][:1])
        np.testing.assert_array_equal(first[:, :-1], by_nanogpt(flat, length, np.arange(8) * length)[0])

        def loop(use: Callable[[torch.Tensor], object]) -> float:
            found: Iterator[dict[str, torch.Tensor]] = iter(batches)  # the order of the epoch is made here
            return seconds(lambda _: use(next(found)["tokens"]))

        figures = alternate(
            {
                "nanoGPT": lambda: seconds(lambda step: by_nanogpt(flat, length, rows[step] * length)),
                "take": lambda: seconds(lambda step: np.take(shared, rows[step], axis=0, out=buffer, mode="clip")),
                "take, memmap": lambda: seconds(
                    lambda step: np.take(mapped, rows[step], axis=0, out=buffer, mode="clip")
                ),
                "legroom": lambda: loop(lambda tokens: tokens),
                "legroom, long": lambda: loop(lambda tokens: tokens.long()),
            },
            rounds,
        )
    least = best(figures)
    note = ", ".join(f"{name} {value * 1e6:.0f} µs" for name, value in least.items())
    case = f"{batch_size} × {length}"
    return [
        Row(f"{case}, numpy.take", least["take"] / least["legroom"], "×", 0.9, at_least=True, note=note),
        Row(f"{case}, numpy.take of a memmap", least["take, memmap"] / least["legroom"], "×", 0.9, at_least=True),
        Row(f"{case}, nanoGPT's loop, as int64", least["nanoGPT"] / least["legroom, long"], "×", 0.9, at_least=True),
    ]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--tokens", type=int, default=100_000_000)
    options.add_argument("--rounds", type=int, default=9)
    given = options.parse_args()
    print(in_words(machine("numpy", "torch")))
    torch.set_num_threads(1)
    with places() as (_, disk):
        path = disk / "train.bin"
        np.random.default_rng(0).integers(0, 50_257, given.tokens, dtype=np.uint16).tofile(path)
        print(show([row for size in SIZES for row in token_batches(path, *size, given.rounds)]))


if __name__ == "__main__":
    main()
