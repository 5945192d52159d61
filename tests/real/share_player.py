"""Two trainers of one group, for test_real_share.py: ``python share_player.py MEGABYTES SECONDS``.

Prints one JSON object, at the latest when an epoch has ended after so many seconds.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
import warnings
from typing import Any

import torch
from torch.utils.data import Dataset

import legroom
from legroom.errors import BudgetTooSmall

warnings.filterwarnings("ignore")


class Images(Dataset[Any]):
    """A batch of four is ``megabytes`` large; sample i is full of i."""

    def __init__(self, megabytes: int) -> None:
        self.floats = megabytes << 18 >> 2

    def __len__(self) -> int:
        return 120

    def __getitem__(self, i: int) -> Any:
        return torch.full((self.floats,), float(i)), i


def train(megabytes: int, seconds: float) -> dict[str, Any]:
    """Epochs until batches of the group were used for a while."""
    loader: Any = legroom.DataLoader(Images(megabytes), 4, num_workers=2, share="real")
    shared, good, peak, began = 0, True, 0, time.monotonic()
    while shared < 60 and time.monotonic() < began + seconds:
        seen = []
        try:
            for images, numbers in loader:
                good = good and bool((images[:, 0] == numbers).all()) and bool((images[:, -1] == numbers).all())
                seen += numbers.tolist()
                group = loader._sharing._group
                shared += group.welcome and not group.missed
                peak = max(peak, shutil.disk_usage("/dev/shm").used)
        except BudgetTooSmall as problem:
            return {"good": good, "shared": shared, "peak": peak, "refused": problem.as_dict()}
        good = good and seen == list(range(120))
    return {"good": good, "shared": shared, "peak": peak}


if __name__ == "__main__":
    reader, writer = os.pipe()
    if os.fork() == 0:
        os.write(writer, json.dumps(train(*map(int, sys.argv[1:3]))).encode())
        os._exit(0)
    mine = train(*map(int, sys.argv[1:3]))
    other = json.loads(os.read(reader, 1 << 16))
    print(json.dumps({"mine": mine, "other": other}))
