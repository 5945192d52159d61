"""Datasets of every temper, for tests that draw from them here or in a child."""

from __future__ import annotations

import os
import signal
import sys
import time
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset


class Images:
    """Cheap: eight float32 images of 3 × 16 × 16 and a label."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if not 0 <= index < 8:
            raise IndexError(index)
        return torch.full((3, 16, 16), float(index)), index


class Computing(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        until = time.thread_time() + 0.004
        while time.thread_time() < until:
            pass
        return super().__getitem__(index)


class Waiting(Images):
    """Each sample takes far longer than a busy machine delays its worker."""

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(0.05)
        return super().__getitem__(index)


class Batched(Images):
    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[index] for index in indices]


class Walked(IterableDataset[torch.Tensor]):
    def __iter__(self) -> Any:
        return iter([torch.zeros(4)] * 5)


class Chatty(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        print('{"result": "not the answer"}', flush=True)
        return super().__getitem__(index)


class Unsendable(Images):
    def __getitem__(self, index: int) -> Any:
        return (lambda: index, torch.zeros(2))


class Raising(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        raise ValueError(f"sample {index} is broken")


class Hanging(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        time.sleep(600)
        return super().__getitem__(index)


class Crashing(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        os.kill(os.getpid(), signal.SIGSEGV)
        return super().__getitem__(index)


class Eating(Images):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        self.kept = [bytearray(os.urandom(1 << 20) * 64) for _ in range(64)]
        return super().__getitem__(index)


class Empty(Images):
    def __len__(self) -> int:
        return 0


def double_collate(samples: list[Any]) -> dict[str, torch.Tensor]:
    images = torch.stack([image for image, _ in samples])
    return {"images": images, "again": images.double()}


def as_they_are(samples: list[Any]) -> list[Any]:
    return samples


def leaving() -> None:
    sys.exit(3)


def make_images() -> Images:
    return Images()


images = Images()
loader = DataLoader(images, batch_size=2, collate_fn=double_collate)
number = 7
