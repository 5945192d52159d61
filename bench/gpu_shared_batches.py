"""Trainers on one GPU that share one set of workers (share="name", device="cuda"), against separate loaders, one alone,
and TensorSocket, which copies each batch to the GPU in its producer.

    PYTHONPATH=src python3 bench/gpu_shared_batches.py [--trainers 4,6] [--workers 16] [--rounds 5] [--seconds 4]
        [--limit SECONDS] [--only shared,tensorsocket]

Covers: 6 ms of CPU work a sample, batches of 64 float images (--side 224: 38 MB a batch); images a second of all
trainers together. The contenders take turns; the median of the rounds counts. Does not cover: training steps on the
GPU. TensorSocket is measured where it can be imported. The result goes to
$OUT/gpu_shared_batches.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))
import legroom
import share
from measure import RESULTS, Row, as_json, in_words, machine, save, show
from share import CpuTime, Samples, together

BATCH, WORK_S = 64, 0.006


def main() -> None:
    parser = argparse.ArgumentParser(description="Trainers on one GPU that share one set of workers.")
    parser.add_argument("--trainers", default="4,6")
    parser.add_argument("--workers", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=4.0, help="that are counted in each round")
    parser.add_argument("--side", type=int, default=224, help="pixels of an image's side")
    parser.add_argument("--limit", type=float, default=1e9, help="seconds, after which no further round begins")
    parser.add_argument("--only", default="shared,tensorsocket,separate,alone", help="contenders")
    chosen = parser.parse_args()
    warnings.filterwarnings("ignore")
    names = subprocess.run(["nvidia-smi", "--query-gpu=name", "--format=csv,noheader"], capture_output=True, text=True)
    # Not torch's name: this process forks the trainers, and must not use CUDA.
    where = {**machine("torch", "numpy", "tensorsocket"), "gpu": names.stdout.strip().splitlines()[0]}
    print(in_words(where), flush=True)
    rows: list[Row] = []
    raw: dict[str, Any] = {}
    for count in map(int, chosen.trainers.split(",")):
        rates = measured(
            count, chosen.workers, chosen.rounds, chosen.seconds, chosen.only.split(","), chosen.limit, chosen.side
        )
        raw[str(count)] = rates
        rows += rows_of(count, rates)
        print(show(rows), flush=True)
    results = Path(os.environ.get("OUT") or RESULTS)
    kept = {
        "machine": where,
        "workers": chosen.workers,
        "side": chosen.side,
        "rounds": chosen.rounds,
        "rows": as_json(rows),
        "raw": raw,
    }
    print(f"kept in {save('gpu_shared_batches', kept, results)}")


def measured(
    trainers: int, workers: int, rounds: int, seconds: float, only: list[str], limit: float, side: int
) -> dict[str, list[float]]:
    """Images a second of all trainers together, by contender, for each round."""
    dataset, cpu = Samples(3 * side * side, WORK_S, BATCH * 2000), CpuTime()
    turn = iter(range(1 << 30))

    def ordinary(each: int, count: int) -> float:
        make = partial(legroom.DataLoader, dataset, BATCH, num_workers=each, pin_memory=True)
        return together([make] * count, seconds, cpu, [], workers=each, use=_to_gpu)

    def shared() -> float:
        name = f"bench-{os.getpid()}-{next(turn)}"
        make = partial(legroom.DataLoader, dataset, BATCH, num_workers=workers, share=name, device="cuda")
        return together([make] * trainers, seconds, cpu, [], shared=True, workers=workers, use=_read)

    def peer() -> float:
        return share.tensorsocket(dataset, trainers, seconds, cpu, [], workers=workers, batch=BATCH, use=_read)

    contenders: dict[str, Callable[[], float]] = {
        "shared": shared,
        "tensorsocket": peer,
        "separate": lambda: ordinary(max(1, workers // trainers), trainers),
        "alone": lambda: ordinary(workers, 1),
    }
    if importlib.util.find_spec("tensorsocket") is None:
        del contenders["tensorsocket"]
    found: dict[str, list[float]] = {who: [] for who in contenders if who in only}
    began = time.monotonic()
    try:
        for number in range(rounds):
            if number and (time.monotonic() - began) * (number + 1) / number > limit:
                break
            for who in list(found)[:: 1 if number % 2 == 0 else -1]:
                found[who].append(contenders[who]() * BATCH)
                print(f"{trainers} trainers, {who}: {found[who][-1]:.0f} images/s", flush=True)
    finally:
        cpu.close()
    return found


def _to_gpu(batch: Any) -> None:
    _read([part.to("cuda", non_blocking=True) for part in batch])


def _read(batch: Any) -> None:
    """Use it on the GPU; a batch that is on the host is an error."""
    assert batch[0].is_cuda
    batch[0][:, ::4096].sum()


def rows_of(trainers: int, rates: dict[str, list[float]]) -> list[Row]:
    """The ratios of the medians."""
    middle = {who: statistics.median(found) for who, found in rates.items() if found}
    words = ", ".join(f"{who} {rate:.0f}/s" for who, rate in middle.items())
    rows = []
    for who, ratio_to, target in (
        ("tensorsocket", "× TensorSocket", 0.97),
        ("separate", "× separate loaders", None),
        ("alone", "× one alone", None),
    ):
        if who in middle and "shared" in middle:
            ratio = middle["shared"] / middle[who] / (trainers if who == "alone" else 1)
            rows.append(Row(f"{trainers} trainers on one GPU", ratio, ratio_to, target, at_least=True, note=words))
    return rows


if __name__ == "__main__":
    main()
