"""Several processes with one dataset in GPU memory: what they take together, how fast they attach and gather.

    PYTHONPATH=src python3 bench/gpu_shared.py [--gb 20] [--processes 1,2,4,6]

All processes make their contexts first. Then one after the other opens the same entry with resident=True, which is
timed, and gathers random batches, from the shared copy and from its own copy (torch's index_select on a tensor of the
same bytes). The result goes to $OUT/gpu_shared.json where OUT is set, else to bench/results/.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

import legroom
from legroom.loader.batches.cuda_resident import ResidentGatherer
from measure import Row, as_json, gpu_machine, places, save, settle, show

ROW = 3 * 224 * 224
SHARDS = 16  # files are hashed side by side


def main() -> None:
    parser = argparse.ArgumentParser(description="Processes that share one copy in GPU memory.")
    parser.add_argument("--gb", type=float, default=20)
    parser.add_argument("--processes", default="1,2,4,6")
    parser.add_argument("--child", nargs="+", default=())
    asked = parser.parse_args()
    if asked.child:
        child(asked.child)
        return
    where = gpu_machine()
    numbers = [int(number) for number in asked.processes.split(",")]
    with places() as (memory, disk):
        start = time.perf_counter()
        size = int(asked.gb * 1e9) // ROW // SHARDS * SHARDS * ROW
        room = shutil.disk_usage(memory).free > 2.2 * size
        paths = write_shards(memory if room else disk, size)
        print(f"written after {time.perf_counter() - start:.1f} s", flush=True)
        with legroom.open(paths, backing="shm") as data:
            data.ready()
            print(f"in the cache after {time.perf_counter() - start:.1f} s", flush=True)
            with processes(paths, max(numbers)) as started:
                found = together(started, numbers)
        print(f"measured after {time.perf_counter() - start:.1f} s", flush=True)
    rows: list[Row] = []
    for one in found:
        number = one["processes"]
        rows += [
            Row(f"{number} processes: GPU memory without contexts : one copy", one["gpu_bytes"] / size, "×", 1.02),
            Row(f"{number} processes: gather : from own memory", min(one["gather_ratio"]), "×", 0.95, at_least=True),
        ]  # fmt: skip
        if number > 1:
            times = [1e3 * seconds for seconds in one["attach_s"][1:]]
            note = f"{min(times):.1f} to {max(times):.1f}"
            rows.append(Row(f"{number} processes: attach, median", median(times), "ms", 5.0, note=note))
    path = save("gpu_shared", {"machine": where, "bytes": size, "ratios": as_json(rows), "runs": found})
    print(show(rows))
    print(path)


def write_shards(folder: Path, size: int) -> list[Path]:
    """Files of random rows. A block of them is written again and again: what the rows are changes no figure."""
    rows = size // ROW // SHARDS
    block = np.random.default_rng(1).integers(0, 255, (min(rows, 256), ROW), np.uint8)

    def write(number: int) -> Path:
        path = folder / f"rows-{number:02}.npy"
        with path.open("wb") as file:
            np.lib.format.write_array_header_1_0(file, {"descr": "|u1", "fortran_order": False, "shape": (rows, ROW)})
            file.write(np.full((1, ROW), number, np.uint8).data)  # no two files are the same
            for first in range(1, rows, len(block)):
                file.write(block[: rows - first].data)
        return path

    with ThreadPoolExecutor(SHARDS) as pool:
        paths = list(pool.map(write, range(SHARDS)))
    settle(*paths)
    return paths


@contextmanager
def processes(paths: list[Path], number: int) -> Iterator[list[subprocess.Popen[str]]]:
    """Processes that have a context and wait to be told to attach."""
    command = [sys.executable, __file__, "--child", *map(os.fspath, paths)]
    started = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) for _ in range(number)
    ]
    try:
        for process in started:
            _line(process)
        yield started
    finally:
        for process in started:
            process.communicate("")


def together(started: list[subprocess.Popen[str]], numbers: list[int]) -> list[dict[str, Any]]:
    """What the first process reports, the first two, and so on: each attaches while those before it have the copy."""
    before = _used()
    answers: list[dict[str, Any]] = []
    found = []
    for process in started:
        assert process.stdin is not None
        process.stdin.write("attach\n")
        process.stdin.flush()
        answers.append(json.loads(_line(process)))
        print(answers[-1], flush=True)
        if len(answers) in numbers:
            names = ("attach_s", "why", "gather_ratio")
            listed = {name: [answer[name] for answer in answers] for name in names}
            found.append({"processes": len(answers), "gpu_bytes": _used() - before, **listed})
    return found


def child(paths: list[str]) -> None:
    """Make a context, wait, attach, gather, report, wait."""
    torch.index_select(torch.ones(8, 8, dtype=torch.int64, device="cuda"), 0, torch.arange(4, device="cuda"))
    torch.randint(0, 8, (8,), device="cuda").clone()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    import_batches()
    print("ready", flush=True)
    sys.stdin.readline()
    start = time.perf_counter()
    data = legroom.open(paths, backing="shm")
    opened = time.perf_counter() - start
    start = time.perf_counter()
    batches = data.batches(1024, shuffle=True, device="cuda", resident=True)
    attach = time.perf_counter() - start
    gatherer = batches._gatherer
    assert isinstance(gatherer, ResidentGatherer)
    use = gatherer._uses["array"]
    assert use is not None
    shared = use.resource.words  # the rows as integers
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
    del own, out, rows, chosen
    torch.cuda.empty_cache()
    report = {"open_s": opened, "attach_s": attach, "why": batches.why, "gather_ratio": rates["own"] / rates["shared"]}
    print(json.dumps(report), flush=True)
    sys.stdin.read()


def import_batches() -> None:
    """Import what is imported at the first use: the data are attached once, the modules are not part of that."""
    for name in ("batch_iterator", "batch_settings", "choose_faster_cuda_path", "cuda_pinned", "cuda_resident"):
        import_module(f"legroom.loader.batches.{name}")


def _line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    found = process.stdout.readline()
    if not found:
        raise SystemExit(f"a process ended with {process.wait()}")
    return found


def _used() -> int:
    free, total = torch.cuda.mem_get_info()
    return total - free


if __name__ == "__main__":
    main()
