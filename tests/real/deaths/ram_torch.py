"""A tensor that no machine has room for: torch's CPU allocator's error."""

import torch

print("building the table", flush=True)
torch.ones(1 << 48, dtype=torch.float64)
