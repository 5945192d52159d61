"""A tensor larger than any machine's memory: the error of torch's CPU allocator."""

import torch

print("building the table", flush=True)
torch.ones(1 << 48, dtype=torch.float64)
