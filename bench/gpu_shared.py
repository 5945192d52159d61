"""Several processes with one dataset in GPU memory: what they take together, how fast they attach and gather.

    PYTHONPATH=src python3 bench/gpu_shared.py [--gb 20] [--processes 1,2,4,6]

Each process opens the same entry with resident=True, attaches, and gathers random batches, alone and from its own copy
(torch's index_select on a tensor of the same bytes). The result goes to $OUT/gpu_shared.json where OUT is set, else to
bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import legroom
from measure import Row, as_json, gpu_machine, places, save, show

ROW = 3 * 224 * 224


def main() -> None:
    parser = argparse.ArgumentParser(description="Processes that share one copy in GPU memory.")
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--processes", default="1,2,4,6")
    parser.add_argument("--child", default="")
    asked = parser.parse_args()
    if asked.child:
        child(Path(asked.child))
        return
    where = gpu_machine()
    rows: list[Row] = []
    with places() as (_, disk):
        source = disk / "rows.npy"
        count = int(asked.gb * 1e9) // ROW
        made = np.lib.format.open_memmap(source, mode="w+", dtype=np.uint8, shape=(count, ROW))
        block = np.random.default_rng(1).integers(0, 255, (1024, ROW), np.uint8)
        for first in range(0, count, 1024):
            made[first : first + 1024] = block[: count - first]
        del made
        with legroom.open(source, backing="shm") as data:
            data.ready()
            torch.ones(1, device="cuda")
            found = [together(source, int(number)) for number in asked.processes.split(",")]
    size = count * ROW
    for one in found:
        number = one["processes"]
        extra = one["gpu_bytes"] - number * one["context_bytes"]
        rows += [
            Row(f"{number} processes: GPU memory without contexts : one copy", extra / size, "×", 1.02),
            Row(f"{number} processes: attach", 1e3 * max(one["attach_s"][1:], default=0), "ms", 5.0, note="slowest"),
            Row(f"{number} processes: gather : from own memory", min(one["gather_ratio"]), "×", 0.95, at_least=True),
        ]  # fmt: skip
    path = save("gpu_shared", {"machine": where, "bytes": size, "ratios": as_json(rows), "runs": found})
    print(show(rows))
    print(path)


def together(source: Path, number: int) -> dict[str, Any]:
    """So many processes, one after the other, and what they report."""
    before = _used()
    started: list[subprocess.Popen[str]] = []
    answers: list[dict[str, Any]] = []
    for _ in range(number):
        command = [sys.executable, __file__, "--child", os.fspath(source)]
        started.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        answers.append(json.loads(started[-1].stdout.readline()))  # type: ignore[union-attr]
    used = _used() - before
    for process in started:
        process.communicate("")
    return {
        "processes": number,
        "gpu_bytes": used,
        "context_bytes": answers[0]["context_bytes"],
        "attach_s": [answer["attach_s"] for answer in answers],
        "why": [answer["why"] for answer in answers],
        "gather_ratio": [answer["gather_ratio"] for answer in answers],
    }


def child(source: Path) -> None:
    """Attach, gather, report, wait."""
    before = _used()
    torch.ones(1, device="cuda").add_(1)
    torch.index_select(torch.ones(8, 8, device="cuda"), 0, torch.arange(4, device="cuda"))
    torch.cuda.synchronize()
    context = _used() - before
    data = legroom.open(source, backing="shm")
    start = time.perf_counter()
    batches = data.batches(1024, shuffle=True, device="cuda", resident=True)
    attach = time.perf_counter() - start
    shared = batches._gatherer._uses["array"].resource.words  # the rows as integers
    own = shared[:4096].clone()
    chosen = torch.randint(0, len(own), (1024,), device="cuda")
    rates = {}
    for name, rows in (("shared", shared[:4096]), ("own", own)):
        out = torch.empty((1024, rows.shape[1]), dtype=rows.dtype, device="cuda")
        best = float("inf")
        for _ in range(20):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            for _ in range(10):
                torch.index_select(rows, 0, chosen, out=out)
            torch.cuda.synchronize()
            best = min(best, time.perf_counter() - begun)
        rates[name] = best
    del own, out
    torch.cuda.empty_cache()
    report = {
        "context_bytes": context,
        "attach_s": attach,
        "why": batches.why,
        "gather_ratio": rates["own"] / rates["shared"],
    }
    print(json.dumps(report), flush=True)
    sys.stdin.read()


def _used() -> int:
    import subprocess as run

    words = run.check_output(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"], text=True)
    return int(words.split()[0]) << 20


if __name__ == "__main__":
    main()
