"""A process that uses data or weights in shared GPU memory, checks every byte, and lives until it is killed.

shared_process.py data|weights PATH      one JSON line, then it waits for its input to end
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch

import legroom


def main() -> None:
    kind, path = sys.argv[1:3]
    torch.ones(1, device="cuda")
    torch.cuda.synchronize()
    report: dict[str, object] = {"pid": os.getpid()}
    if kind == "data":
        data = legroom.open(path)
        start = time.perf_counter()
        batches = data.batches(64, device="cuda", resident=True)
        report |= {"seconds": time.perf_counter() - start, "why": batches.why}
        report["right"] = all(
            torch.equal(batch[name].cpu(), expected[name])
            for batch, expected in zip(batches, data.batches(64), strict=True)
            for name in expected
        )
    else:
        start = time.perf_counter()
        found = legroom.weights(path, "cuda", shared=True)
        report |= {"seconds": time.perf_counter() - start, "why": found.why}
        host = legroom.weights(path)
        report["right"] = all(
            torch.equal(found[name].cpu().view(torch.uint8), host[name].view(torch.uint8)) for name in host
        )
    print(json.dumps(report), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
