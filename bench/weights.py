"""Weights to a GPU: legroom.weights against safetensors, torch.load, fastsafetensors and runai-model-streamer.

    PYTHONPATH=src python3 bench/weights.py [--gb 16] [--rounds 3] [--limit SECONDS] [--no-checkpoint]

Files and cache are warm. Each contender first loads once, and its tensors are compared bit by bit with those of
safetensors. Then they take turns, and a figure is the best of the rounds. What is not installed, fails or loads other
tensors is a row with the reason. The result goes to $OUT/weights.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from safetensors.torch import save_file

import legroom
import weights_peers
from measure import Row, alternate, as_json, gpu_machine, places, save, settle, show
from weights_peers import Peer, Tensors, require_same

OURS = "legroom.weights"


def main() -> None:
    parser = argparse.ArgumentParser(description="Weights to a GPU, side by side.")
    parser.add_argument("--gb", type=float, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--limit", type=float, default=math.inf, help="seconds after the start, when no further round begins"
    )
    parser.add_argument("--no-checkpoint", action="store_true", help="leave out torch.load")
    parser.add_argument("--attach", default="")
    asked = parser.parse_args()
    start = time.perf_counter()
    if asked.attach:
        attach(asked.attach)
        return
    where = gpu_machine("safetensors", "fastsafetensors", "runai-model-streamer")
    with places() as (memory, disk):
        path, checkpoint = disk / "model.safetensors", memory / "model.pt"
        size = _write_files(asked.gb, path, None if asked.no_checkpoint else checkpoint)
        peers = _peers(path, None if asked.no_checkpoint else checkpoint)
        settle(path)
        legroom.weights(path)
        phases: list[dict[str, float]] = []
        _compare(partial(_ours, path, []), peers, path)
        contenders: dict[str, Callable[[], float]] = {
            name: partial(peer.attempt, _rate(size, peer.load)) for name, peer in peers.items()
        }
        contenders[OURS] = _rate(size, partial(_ours, path, phases))
        speeds = alternate(contenders, asked.rounds, start + asked.limit - time.perf_counter())
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
    best = {name: max(found) for name, found in speeds.items() if name == OURS or not peers[name].failed}
    rows = [Row(OURS, best[OURS] / 1e9, "GB/s", 25.0, at_least=True)]
    rows += [_row(name, peer, best) for name, peer in peers.items()]
    least = min(found["total"] for found in attached)
    rows.append(Row("shared=True in a second process, after its context", 1e3 * least, "ms", 20.0))
    body = {"machine": where, "bytes": size, "ratios": as_json(rows), "bytes_a_second": best}
    result = save("weights", {**body, "seconds": {"own copy": phases, "attach": attached}})
    print(show(rows))
    print(result)


def _write_files(gigabytes: float, path: Path, checkpoint: Path | None) -> int:
    """The same tensors in both files; returns their bytes."""
    count = max(1, int(gigabytes * 1e9) // (4096 * 4096 * 2))
    one = torch.randn(4096, 4096).bfloat16()
    tensors = {f"layer.{n}.weight": one + n for n in range(count)}
    save_file(tensors, path)
    if checkpoint is not None:
        torch.save(tensors, checkpoint)
    return sum(tensor.nbytes for tensor in tensors.values())


def _peers(path: Path, checkpoint: Path | None) -> dict[str, Peer]:
    device = f"cuda:{torch.cuda.current_device()}"
    found = {"safetensors load_file": Peer("safetensors", partial(weights_peers.safetensors, path, device))}
    if checkpoint is not None:
        found["torch.load(mmap=True).to('cuda')"] = Peer("torch", partial(weights_peers.torch_load, checkpoint, device))
    found["fastsafetensors"] = Peer(
        "fastsafetensors", partial(weights_peers.fastsafetensors, path, device), "reads without O_DIRECT"
    )
    found["runai-model-streamer"] = Peer(
        "runai_model_streamer", partial(weights_peers.runai_model_streamer, path, device)
    )
    return found


def _compare(ours: Callable[[], Tensors], peers: dict[str, Peer], path: Path) -> None:
    """Load once with each, before anything is measured. A peer with other tensors is left out; ours must be right."""
    expected = weights_peers.safetensors(path, f"cuda:{torch.cuda.current_device()}")
    require_same(ours(), expected)
    for name, peer in peers.items():
        torch.cuda.empty_cache()
        seconds = peer.attempt(partial(_seconds_to_compare, peer.load, expected))
        print(f"{name}: {peer.failed or f'the same tensors as safetensors, {seconds:.1f} s'}", flush=True)


def _seconds_to_compare(load: Callable[[], Tensors], expected: Tensors) -> float:
    start = time.perf_counter()
    require_same(load(), expected)
    return time.perf_counter() - start


def _row(name: str, peer: Peer, best: dict[str, float]) -> Row:
    if peer.failed:
        return Row(f"{OURS} : {name}", None, "", note=peer.failed)
    target = 5.0 if name == "safetensors load_file" else None
    note = ", ".join(filter(None, [f"{best[name] / 1e9:.1f} GB/s", peer.setting]))
    return Row(f"{OURS} : {name}", best[OURS] / best[name], "×", target, at_least=True, note=note)


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


def _ours(path: Path, phases: list[dict[str, float]]) -> Tensors:
    found = legroom.weights(path, "cuda")
    phases.append(found.seconds)
    return found


def _milliseconds(seconds: dict[str, float]) -> str:
    return ", ".join(f"{name} {1e3 * value:.1f}" for name, value in seconds.items())


def _rate(size: int, load: Callable[[], Tensors]) -> Callable[[], float]:
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
