"""The disk is full while torch writes a checkpoint."""

import os

import torch

for step in range(100):
    print(f"step {step}", flush=True)
    torch.save({"weights": torch.rand(1 << 18)}, f"{os.environ['DEATH_DISK']}/step{step}.pt")
