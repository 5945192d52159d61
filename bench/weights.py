"""Weights to a GPU: legroom.weights against safetensors and torch.load.

    PYTHONPATH=src python3 bench/weights.py [--gb 16] [--rounds 3] [--no-checkpoint]

Files and cache are warm. Contenders take turns, and a figure is the best of the rounds. The result goes to
$OUT/weights.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import legroom
from measure import Row, alternate, as_json, gpu_machine, places, save, settle, show


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights to a GPU, side by side.")
    parser.add_argument("--gb", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--no-checkpoint", action="store_true", help="leave out torch.load")
    parser.add_argument("--attach", default="")
    asked = parser.parse_args()
    if asked.attach:
        attach(asked.attach)
        return
    where = gpu_machine()
    with places() as (memory, disk):
        count = max(1, int(asked.gb * 1e9) // (4096 * 4096 * 2))
        one = torch.randn(4096, 4096).bfloat16()
        tensors = {f"layer.{n}.weight": one + n for n in range(count)}
        size = sum(tensor.nbytes for tensor in tensors.values())
        path = disk / "model.safetensors"
        save_file(tensors, path)
        contenders: dict[str, Callable[[], object]] = {"safetensors load_file": lambda: load_file(path, device="cuda")}
        if not asked.no_checkpoint:
            checkpoint = memory / "model.pt"
            torch.save(tensors, checkpoint)
            contenders["torch.load(mmap=True).to('cuda')"] = lambda: _torch_load(checkpoint)
        del tensors
        settle(path)
        legroom.weights(path)
        phases: list[dict[str, float]] = []
        contenders["legroom.weights"] = lambda: _ours(path, phases)
        speeds = alternate({name: _rate(size, load) for name, load in contenders.items()}, asked.rounds)
        print(
            f"{size / 1e9:.1f} GB:",
            {name: [f"{rate / 1e9:.1f} GB/s" for rate in found] for name, found in speeds.items()},
        )
        for found in phases:
            print("legroom.weights, ms:", _milliseconds(found), flush=True)
        torch.cuda.empty_cache()
        kept = legroom.weights(path, "cuda", shared=True)
        print("shared=True, first process, ms:", _milliseconds(kept.seconds), flush=True)
        attached = []
        for _ in range(asked.rounds):
            said = subprocess.check_output([sys.executable, __file__, "--attach", os.fspath(path)], text=True)
            attached.append(json.loads(said))
            print("shared=True, second process, ms:", _milliseconds(attached[-1]), flush=True)
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
    least = min(found["total"] for found in attached)
    rows.append(Row("shared=True in a second process, after its context", 1e3 * least, "ms", 20.0))
    body = {"machine": where, "bytes": size, "ratios": as_json(rows), "bytes_a_second": best}
    result = save("weights", {**body, "seconds": {"own copy": phases, "attach": attached}})
    print(show(rows))
    print(result)


def attach(path: str) -> None:
    """In a second process, which has a context and has imported what it uses: the seconds of each phase as JSON."""
    from legroom import weights

    torch.ones(1, device="cuda").add_(1)
    torch.cuda.synchronize()
    start = time.perf_counter()
    found = weights(path, "cuda", shared=True)
    total = time.perf_counter() - start
    assert "with other processes" in found.why, found.why
    print(json.dumps({"total": total, **found.seconds}))


def _ours(path: Path, phases: list[dict[str, float]]) -> object:
    found = legroom.weights(path, "cuda")
    phases.append(found.seconds)
    return found


def _milliseconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())


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
