"""Measure GPU memory: find_batch_size against brute force, estimate against a real step, a limit against its footprint.

Needs a CUDA GPU; everything runs under a limit of 8 GB, so that brute force is quick. A measurement
that fails is recorded with its error. JSON goes to the folder named by OUT, else to bench/results/.

    PYTHONPATH=src python3 bench/gpu_memory.py
"""

from __future__ import annotations

import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import legroom
from legroom.gpu.batch_trial_on_gpu import GpuTrialRunner
from legroom.gpu.torch_cuda_device import CudaDevice
from legroom.probe.gpu_devices import gpus
from legroom.probe.host_files_and_syscalls import Host
from legroom.version import VERSION
from measure import in_words, machine, save

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent / "tests" / "gpu" / "scripts"))
from gpu_models import MODELS  # noqa: E402

CAP = 8 << 30
MARGIN = 0.05


def limit() -> dict[str, Any]:
    made = legroom.gpu.limit(CAP)
    return {
        "asked": made.asked, "allowed": made.allowed, "overhead": made.overhead.bytes, "how": made.overhead.how,
        "source": made.overhead.source, "notes": made.notes, "again": made.recheck().overhead.bytes,
    }  # fmt: skip


def finder(name: str) -> dict[str, Any]:
    make, worst_case = MODELS[name]
    step = make()
    started = time.perf_counter()
    found = legroom.gpu.find_batch_size(step, margin=MARGIN, worst_case=worst_case)
    seconds = time.perf_counter() - started
    best, tried = _brute(step, worst_case, found.batch)
    return {
        "found": found.batch, "brute": best, "off": found.batch / best - 1, "trials": len(found.trials),
        "seconds": seconds,
        "brute_trials": tried, "brute_seconds": time.perf_counter() - started - seconds, "notes": found.notes,
        "curve": [[t.batch, t.fits, t.peak, t.reserved, t.retries, t.seconds] for t in found.trials],
        "bound": found.bound, "fixed": found.fixed, "per_sample": found.per_sample,
    }  # fmt: skip


def _brute(step: Any, worst_case: Any, around: int) -> tuple[int, int]:
    """The largest batch that fits, by bisection to half a percent, and the trials that took."""
    runner = GpuTrialRunner(CudaDevice(torch, 0), step, MARGIN, worst_case=worst_case)
    low, high, tried = max(1, around // 2), around * 2, 0
    try:
        while high - low > max(1, around // 200):
            middle, tried = (low + high) // 2, tried + 1
            low, high = (middle, high) if runner.try_batch(middle).trial.fits else (low, middle)
    finally:
        runner.close()
    return low, tried


def estimate(name: str) -> dict[str, Any]:
    step: Any = MODELS[name][0]()
    optimizer = torch.optim.AdamW(step.model.parameters())
    found = legroom.gpu.estimate(step.model, step.data(64), optimizer)
    step(64)
    torch.cuda.reset_peak_memory_stats()
    step(64)
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated()
    return {**found.as_dict(), "measured": peak, "off": found.peak / peak - 1}


def account() -> dict[str, Any]:
    found = legroom.gpu.account()
    return {
        "size": found.size, "used": found.used, "unknown": found.unknown, "others": found.others,
        "overhead": found.overhead.bytes, "how": found.overhead.how, "reasons": dict(found.reasons),
    }  # fmt: skip


def place() -> dict[str, Any]:
    """The machine, its GPU and driver, and the Legroom version."""
    where = {**machine("torch", "numpy"), "gpu": torch.cuda.get_device_name(), "driver": gpus(Host()).driver}
    where["packages"]["legroom"] = VERSION  # not installed: it runs from source
    return where


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device: nothing to measure")
    work: dict[str, Callable[[], dict[str, Any]]] = {"limit": limit, "account": account}
    work |= {f"finder-{name}": (lambda name=name: finder(name)) for name in MODELS}  # type: ignore[misc]
    work |= {f"estimate-{name}": (lambda name=name: estimate(name)) for name in ("conv", "transformer")}  # type: ignore[misc]
    where = place()
    print(in_words(where), where["gpu"], where["driver"], sep="\n", flush=True)
    results: dict[str, Any] = {"machine": where}
    for name, measure in work.items():
        started = time.perf_counter()
        try:
            results[name] = measure()
        except Exception:
            results[name] = {"error": traceback.format_exc()}
        results[name]["took"] = time.perf_counter() - started
        gc.collect()
        torch.cuda.empty_cache()
        print(name, json.dumps(results[name])[:400], flush=True)
    print(save("gpu_memory", results))


if __name__ == "__main__":
    main()
