"""One experiment: a small classifier at one learning rate, on the copy of the data that all experiments share.

    python experiment.py --h5 train.h5 --lr 0.01 [--seed 0] [--steps 100] [--batch 64]

The file has ``images`` (uint8: image, row, column, channel) and ``labels``. What happens is told in JSON, a line each.
With ``--wait`` it stops when its memory has settled, until it reads a line: so many can be measured side by side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F  # noqa: N812

import legroom
from legroom.messages import either

KEYS = ("images", "labels")
SMALLEST = 13  # pixels of a side: below that nothing is left after the two convolutions


def tell(**facts: object) -> None:
    print(json.dumps(facts), flush=True)


def endless(data, batch: int, seed: int, device: torch.device) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Batches, epoch after epoch, each in another order."""
    while True:
        for rows in data.batches(batch, shuffle=True, seed=seed, device=device, keys=KEYS):
            yield rows["images"].permute(0, 3, 1, 2).float() / 255 - 0.5, rows["labels"]


def why_unfit(images, labels) -> str | None:
    """Why nothing can be learnt from the arrays, if so; rows of several lengths, as words are, come as no ndarray."""
    if not isinstance(images, np.ndarray) or images.ndim != 4 or len(images) == 0:
        return f"images must be (image, row, column, channel), and are {getattr(images, 'shape', 'of several lengths')}"
    if min(images.shape[1:3]) < SMALLEST:
        return f"images must be {SMALLEST} x {SMALLEST} or larger, and are {images.shape[1]} x {images.shape[2]}"
    whole = isinstance(labels, np.ndarray) and labels.dtype.kind in "iu"
    if not whole or labels.shape != images.shape[:1] or labels.min() < 0:
        return "labels must be a whole number, 0 or more, for each image"
    return None


def network(channels: int, classes: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, 16, 5, stride=2), nn.ReLU(),
        nn.Conv2d(16, 32, 5, stride=2), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, classes),
    )  # fmt: skip


def learn(model: nn.Module, optimizer: torch.optim.Optimizer, images, labels) -> float:
    """One step; the share of the batch that was right before it was learnt from."""
    scores = model(images)
    optimizer.zero_grad()
    F.cross_entropy(scores, labels).backward()
    optimizer.step()
    return (scores.argmax(1) == labels).float().mean().item()


def gpu_bytes() -> int | None:
    """What this process holds on its card, context included; None where that cannot be told, or there is none."""
    if not torch.cuda.is_available():
        return None
    context = legroom.gpu.account().overhead.bytes
    return None if context is None else context + torch.cuda.memory_reserved()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either("Run one experiment on the shared data.", "在共享数据上运行一个实验。")
    )
    parser.add_argument("--h5", required=True, help=either("the data", "数据文件"))
    parser.add_argument("--lr", type=float, required=True, help=either("learning rate", "学习率"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=100, help=either("default 100", "步数（默认 100）"))
    parser.add_argument("--batch", type=int, default=64, help=either("images a step (default 64)", "批大小（默认 64）"))
    parser.add_argument(
        "--wait",
        action="store_true",
        help=either("stop for a line on stdin before the second step", "第二步之前等待标准输入的一行"),
    )
    flags = parser.parse_args()
    if flags.steps < 2 or flags.batch < 1 or not flags.lr > 0:
        parser.error(
            either(
                "--steps must be 2 or more, --batch 1 or more, --lr above 0",
                "--steps 至少为 2，--batch 至少为 1，--lr 大于 0",
            )
        )

    open_data = legroom.open  # imported now, not while the clock runs
    started = time.perf_counter()
    try:
        data = open_data(flags.h5)
        seconds = time.perf_counter() - started
        images, labels = (data[name] for name in KEYS)
    except legroom.LegroomError as error:
        parser.exit(error.exit_status, f"{error}\n")
    if unfit := why_unfit(images, labels):
        parser.error(f"{flags.h5}: {unfit}")
    data.ready()  # every page is mapped, and so counted

    torch.manual_seed(flags.seed)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = network(images.shape[3], int(labels.max()) + 1).to(device)
    optimizer = torch.optim.Adam(model.parameters(), lr=flags.lr)
    batches = itertools.islice(endless(data, flags.batch, flags.seed, device), flags.steps)
    right = [learn(model, optimizer, *next(batches))]
    tell(opened=seconds, bytes=data.info.bytes, backing=data.info.backing, gpu=gpu_bytes())
    if flags.wait and not sys.stdin.readline():
        sys.exit("whoever was to say when to go on is gone")
    right += [learn(model, optimizer, *batch) for batch in batches]
    late = right[len(right) // 2 :]
    tell(accuracy=sum(late) / len(late))


if __name__ == "__main__":
    main()
