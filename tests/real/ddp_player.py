"""One rank of a small DDP training on batches. Run as a script: file, epochs; the launcher's environment."""

from __future__ import annotations

import datetime
import json
import os
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

import legroom


def main(path: str, epochs: int) -> None:
    # Shorter than the test's own patience: a rank that waits for a batch that no rank has fails, with the reason.
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    timeout = datetime.timedelta(seconds=60)
    # By a file: another process may take a port that was free when the test looked.
    dist.init_process_group("gloo", timeout=timeout, init_method=f"file://{path}.ranks", rank=rank, world_size=world)
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(12, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-5)
    data = legroom.open(path)
    for uneven in ("pad", "drop"):
        data.next_epoch = 0
        steps, seen = [], []
        for _ in range(epochs):
            steps.append(0)
            for batch in data.batches(8, shuffle=True, seed=3, uneven=uneven):
                optimizer.zero_grad()
                model(batch["images"].flatten(1)).square().mean().backward()
                optimizer.step()
                steps[-1] += 1
                seen.append(batch["labels"].tolist())
        weight = model.module.weight.detach().flatten().tolist()
        print(json.dumps({"steps": steps, "seen": seen, "weight": weight}), flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
