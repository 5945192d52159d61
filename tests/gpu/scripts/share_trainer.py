"""A trainer of a group with its batches on the GPU, for test_gpu_share.py.

share_trainer.py FILE EPOCHS PAUSE cuda|pin    writes a line for each batch, then "end" and how the batches came

After the first batch it waits for a file "go" beside FILE: the producer takes seconds to start.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "unit" / "loader"))
import share_data

import legroom
from legroom.loader.dataloader.pin_memory import map_batch


def loader(**given: Any) -> Any:
    data = share_data.Noise(120, seconds=0.002, floats=50_000)
    return legroom.DataLoader(data, 4, shuffle=True, num_workers=2, share="gpu-test", **given)


def main() -> None:
    path, epochs, pause, how = sys.argv[1:5]
    warnings.filterwarnings("ignore")
    batches = loader(**{"cuda": {"device": "cuda"}, "pin": {"pin_memory": True}}[how])
    fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for epoch in range(int(epochs)):
        kept = None
        for number, batch in enumerate(batches):
            image = batch["image"]
            assert image.is_cuda if how == "cuda" else image.is_pinned()
            host = map_batch(batch, lambda one: one.cpu().clone() if isinstance(one, torch.Tensor) else None)
            os.write(fd, (share_data.line(epoch, number, host) + "\n").encode())
            if kept is not None:
                assert torch.equal(kept[0].cpu(), kept[1])  # what the last batch was is still there
            kept = image, host["image"]
            if number % 3:
                image.fill_(-1.0)  # nobody else sees that
                kept = image, torch.full_like(host["image"], -1.0)
            while not os.path.exists(os.path.join(os.path.dirname(path), "go")):
                time.sleep(0.01)
            time.sleep(float(pause))
    os.write(fd, f"end {batches.why}\n".encode())


if __name__ == "__main__":
    main()
