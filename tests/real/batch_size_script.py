"""Runs inside a memory cgroup: find a batch for a small network on the CPU, train with it, print one JSON line.

Arguments: ``find`` or ``brute LOW HIGH`` (the largest batch from LOW, which fits, to HIGH, by bisection).
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
from torch import nn

import legroom
from legroom.gpu.batch_trial_in_child import ForkTrialRunner
from legroom.probe.ram_swap_and_pressure import free_memory

MARGIN = 0.1


def training() -> Any:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 512), nn.ReLU(), nn.Linear(512, 8))
    optimizer = torch.optim.AdamW(model.parameters())

    def step(batch: int) -> None:
        optimizer.zero_grad()
        model(torch.ones(batch, 256, 512)).square().mean().backward()
        optimizer.step()

    return step


def main() -> None:
    step = training()
    if sys.argv[1] == "find":
        found = legroom.gpu.find_batch_size(step, margin=MARGIN, device="cpu")
        for _ in range(3):
            step(found.batch)
        report = {
            "batch": found.batch,
            "bound": found.bound,
            "trials": len(found.trials),
            "curve": [repr(trial) for trial in found.trials],
            "measure": found.measure,
        }
    else:
        low, high = int(sys.argv[2]), int(sys.argv[3])
        bound, source = free_memory()
        assert bound is not None
        runner = ForkTrialRunner(step, MARGIN, bound, source)
        tried: list[str] = []
        while high - low > max(1, low // 100):
            middle = (low + high) // 2
            outcome = runner.try_batch(middle)
            tried.append(repr(outcome.trial))
            low, high = (middle, high) if outcome.trial.fits else (low, middle)
        report = {"batch": low, "bound": bound, "curve": tried}
    print(json.dumps(report))


if __name__ == "__main__":
    main()
