"""Limit this process to a share of the GPU, allocate all it can, then load more kernels.

Argument: the share. Prints one JSON line and waits for a line on standard input before it exits.
"""

from __future__ import annotations

import json
import sys

import torch

import legroom

share = float(sys.argv[1])
made = legroom.gpu.limit(share)
blocks = []
size = 512 << 20
while size >= 2 << 20:
    try:
        blocks.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        size //= 2
# Kernels that are not loaded yet, with little memory left.
del blocks[-1]
for work in (
    lambda: torch.randn(64, 64, device="cuda").softmax(-1).cumsum(0).sort().values.sum(),
    lambda: torch.nn.functional.conv2d(torch.ones(1, 4, 16, 16, device="cuda"), torch.ones(4, 4, 5, 5, device="cuda")),
    lambda: torch.linalg.qr(torch.randn(16, 16, device="cuda")),
    lambda: torch.fft.rfft(torch.ones(256, device="cuda")),
    lambda: torch.nn.functional.layer_norm(torch.randn(8, 64, device="cuda", dtype=torch.float16), (64,)),
):
    try:
        work()
    except torch.OutOfMemoryError:
        pass
torch.cuda.synchronize()
report = {
    "asked": made.asked, "allowed": made.allowed, "overhead": made.overhead.bytes, "how": made.overhead.how,
    "reserved": torch.cuda.memory_reserved(), "notes": made.notes, "read_back": made.read_back,
}  # fmt: skip
print(json.dumps(report), flush=True)
sys.stdin.readline()
