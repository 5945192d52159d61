"""A training like people's own, small: a loader with workers, accumulation, checkpoints, resuming.

It keeps its place in the epoch in the checkpoint and writes down every sample it trains on, so that a test can see
whether one was trained on twice or left out. legroom.DataLoader tells its place by itself; torch's does not, so there
the script counts. How much memory it wants is told by its arguments.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Dataset

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=32)
parser.add_argument("--num_workers", type=int, default=4)
parser.add_argument("--accum_iter", type=int, default=1)
parser.add_argument("--epochs", type=int, default=2)
parser.add_argument("--samples", type=int, default=128)
parser.add_argument("--sample-bytes", type=int, default=1 << 20)
parser.add_argument("--worker-bytes", type=int, default=0)  # what a worker comes to hold
parser.add_argument("--step-bytes", type=int, default=0)  # activations, for each sample of a batch
parser.add_argument("--late-bytes", type=int, default=0)  # the same, but only after the first checkpoint
parser.add_argument("--loader", choices=("torch", "legroom"), default="torch")
parser.add_argument("--folder", type=Path, required=True)
parser.add_argument("--resume")
args = parser.parse_args()


class Samples(Dataset):
    def __init__(self):
        self.held = None

    def __len__(self):
        return args.samples

    def __getitem__(self, index):
        if self.held is None:
            self.held = torch.ones(args.worker_bytes, dtype=torch.uint8)
        return torch.full((args.sample_bytes,), index % 251, dtype=torch.uint8), index


class FromPlace(torch.utils.data.Sampler):
    """The epoch's order, from where the last run stopped."""

    def __init__(self, epoch, start):
        order = torch.Generator().manual_seed(epoch)
        self.indices = torch.randperm(args.samples, generator=order).tolist()[start:]

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


state = {"epoch": 0, "place": 0, "steps": 0, "trained": []}
if args.resume:
    state = torch.load(args.resume, weights_only=True)
    print(f"resumed at epoch {state['epoch']}, sample {state['place']}", flush=True)

data = Samples()
ours = None
if args.loader == "legroom":
    import legroom

    ours = legroom.DataLoader(
        data, args.batch, shuffle=True, num_workers=args.num_workers, generator=torch.Generator().manual_seed(7)
    )
    if args.resume:
        ours.load_state_dict(state["loader"])
weight = torch.zeros(1, requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.1)
while state["epoch"] < args.epochs:
    loader = ours or DataLoader(
        data, args.batch, sampler=FromPlace(state["epoch"], state["place"]), num_workers=args.num_workers
    )
    waiting = []
    for batch, indices in loader:
        wanted = args.step_bytes + (args.late_bytes if state["steps"] else 0)
        activations = torch.ones(len(batch) * wanted, dtype=torch.uint8)
        loss = (weight - batch[:, 0].float().mean()) ** 2 / args.accum_iter
        loss.sum().backward()
        waiting += indices.tolist()
        del activations, batch
        if len(waiting) < args.batch * args.accum_iter:
            continue
        optimizer.step()
        optimizer.zero_grad()
        state["trained"].append([state["epoch"], waiting])
        state["place"] += len(waiting)
        state["steps"] += 1
        waiting = []
        if ours is not None:
            state["loader"] = ours.state_dict()
        torch.save(state, args.folder / f"step{state['steps']:04}.pt")
        print(f"step {state['steps']}", flush=True)
    state.update(epoch=state["epoch"] + 1, place=0)
(args.folder / "done.json").write_text(json.dumps(state["trained"]))
print("done", flush=True)
