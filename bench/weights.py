"""Weights to a GPU: legroom.weights against safetensors, torch.load and, where installed, fastsafetensors.

    PYTHONPATH=src python3 bench/weights.py [--gb 8] [--rounds 3]

Files and cache are warm. Contenders take turns, and a figure is the best of the rounds. The result goes to
$OUT/weights.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import torch

import legroom
from measure import Row, alternate, as_json, gpu_machine, places, save, show


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights to a GPU, side by side.")
    parser.add_argument("--gb", type=float, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--attach", default="")
    asked = parser.parse_args()
    if asked.attach:
        torch.ones(1, device="cuda").add_(1)
        torch.cuda.synchronize()
        start = time.perf_counter()
        legroom.weights(asked.attach, "cuda", shared=True)
        print(time.perf_counter() - start)
        return
    where = gpu_machine()
    with places() as (_, disk):
        count = max(1, int(asked.gb * 1e9) // (4096 * 4096 * 2))
        tensors = {f"layer.{n}.weight": torch.randn(4096, 4096).bfloat16() for n in range(count)}
        size = sum(tensor.nbytes for tensor in tensors.values())
        checkpoint = disk / "model.pt"
        torch.save(tensors, checkpoint)
        path, contenders = checkpoint, {"torch.load(mmap=True).to('cuda')": lambda: _torch_load(checkpoint)}
        if find_spec("safetensors"):
            from safetensors.torch import load_file, save_file

            path = disk / "model.safetensors"
            save_file(tensors, path)
            contenders["safetensors load_file"] = lambda: load_file(path, device="cuda")
        del tensors
        legroom.weights(path)
        contenders["legroom.weights"] = lambda: legroom.weights(path, "cuda")
        speeds = alternate({name: _rate(size, load) for name, load in contenders.items()}, asked.rounds)
        kept = legroom.weights(path, "cuda", shared=True)
        attach = min(
            float(subprocess.check_output([sys.executable, __file__, "--attach", os.fspath(path)], text=True))
            for _ in range(asked.rounds)
        )
        kept.close()
    best = {name: max(found) for name, found in speeds.items()}
    ours = best["legroom.weights"]
    rows = [Row("legroom.weights", ours / 1e9, "GB/s", 25.0, at_least=True)]
    for name, rate in best.items():
        if name != "legroom.weights":
            target = 5.0 if "safetensors" in name else None
            rows.append(
                Row(f"legroom.weights : {name}", ours / rate, "×", target, at_least=True, note=f"{rate / 1e9:.1f} GB/s")
            )
    rows.append(Row("shared=True in a second process, after its context", 1e3 * attach, "ms", 20.0))
    result = save("weights", {"machine": where, "bytes": size, "ratios": as_json(rows), "bytes_a_second": best})
    print(show(rows))
    print(result)


def _torch_load(path: Path) -> object:
    found = torch.load(path, mmap=True, weights_only=True)
    return {name: tensor.to("cuda") for name, tensor in found.items()}


def _rate(size: int, load: Callable[[], object]) -> Callable[[], float]:
    def measure() -> float:
        torch.cuda.empty_cache()
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = load()
        torch.cuda.synchronize()
        taken = time.perf_counter() - start
        del found
        return size / taken

    return measure


if __name__ == "__main__":
    main()
