"""One of two DDP ranks on the CPU; rank 1 runs out of memory above 4 samples. Prints how far gradients differ.

Arguments: rank, rendezvous file.
"""

from __future__ import annotations

import json
import sys
from typing import Any

import torch
import torch.distributed as dist

import legroom

rank = int(sys.argv[1])
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{sys.argv[2]}", rank=rank, world_size=2)
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3)).double()
model = torch.nn.parallel.DistributedDataParallel(plain)
torch.manual_seed(10 + rank)
batch = (torch.randn(12, 6).double(), torch.randint(0, 3, (12,)))


def whole(part: Any) -> Any:
    return torch.nn.functional.cross_entropy(model(part[0]), part[1])


whole(batch).backward()  # DDP averages over both ranks
wanted = [one.grad.clone() for one in plain.parameters()]
model.zero_grad()


@legroom.gpu.on_oom(model)
def loss_of(part: Any) -> Any:
    if rank == 1 and len(part[0]) > 4:
        raise torch.OutOfMemoryError("CUDA out of memory.")
    return whole(part)


loss_of(batch)
difference = max(float((one.grad - two).abs().max()) for one, two in zip(plain.parameters(), wanted, strict=True))
try:
    legroom.gpu.find_batch_size(lambda batch: None, device="cpu", max_batch=8 + rank)
    disagreed = False
except legroom.LegroomError as problem:
    disagreed = problem.code == "ranks-disagree"
found = legroom.gpu.find_batch_size(lambda batch: None, device="cpu", max_batch=8, effective_batch=64)
report = {
    "difference": difference,
    "micro": loss_of.micro_batch,
    "disagreed": disagreed,
    "batch": found.batch,
    "steps": found.accumulation,
}
print(json.dumps(report))
dist.destroy_process_group()
