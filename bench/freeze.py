"""Annotations as in COCO: legroom.freeze against a plain list and against a list of pickles in one numpy buffer.

    PYTHONPATH=src python3 bench/freeze.py [--part speed] [--records 250000] [--plain-records 80000]

The numpy buffer is what detectron2 does (its class is written again here). Memory is the PSS of a process and its
forked workers after they have read every record in every epoch, without that of the same processes without data.
Eight copies of a plain list of 2 GB need more than 16 GB, so it has fewer records; copies are counted relative to it.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

import legroom
from measure import RESULTS, Row, alternate, as_json, in_words, kept, machine, places, save, show


def coco_annotations(count: int) -> list[dict[str, Any]]:
    chance = random.Random(0)
    number = chance.random
    return [
        {
            "file_name": f"train2017/{index:012d}.jpg",
            "image_id": index,
            "height": 480,
            "width": 640,
            "annotations": [
                {
                    "bbox": [round(number() * 640, 2) for _ in range(4)],
                    "category_id": chance.randrange(80),
                    "area": number() * 1e4,
                    "iscrowd": 0,
                    "segmentation": [[round(number() * 640, 2) for _ in range(2 * chance.randrange(6, 30))]],
                }
                for _ in range(chance.randrange(1, 9))
            ],
        }
        for index in range(count)
    ]


class PickledList:
    """Pickles one after the other in a numpy buffer, and where each ends."""

    def __init__(self, items: list[Any]) -> None:
        parts = [np.frombuffer(pickle.dumps(item, protocol=-1), np.uint8) for item in items]
        self._ends = np.cumsum([len(part) for part in parts], dtype=np.int64)
        self._data = np.concatenate(parts)

    def __len__(self) -> int:
        return len(self._ends)

    def __getitem__(self, index: int) -> Any:
        start = 0 if index == 0 else self._ends[index - 1].item()
        return pickle.loads(memoryview(self._data[start : self._ends[index].item()]))


def pss(pid: int) -> int:
    lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:"))


def memory(kind: str, asked: argparse.Namespace) -> dict[str, int]:
    """In a process of its own: PSS of it and its workers at the end, and the size of the data in it."""
    gc.collect()
    before = pss(os.getpid())
    data: Any = legroom.freeze(coco_annotations(1))  # what is subtracted: the same work on almost no data
    if kind == "plain":
        data = coco_annotations(asked.records)
    elif kind == "frozen":
        data = pickle.loads(Path(asked.view).read_bytes())
    gc.collect()
    size = data.info.bytes if kind == "frozen" else pss(os.getpid()) - before
    (go, tell), (hear, done) = os.pipe(), os.pipe()
    pids = []
    for number in range(asked.workers):
        pid = os.fork()
        if pid == 0:
            chance = random.Random(number)
            for _ in range(asked.epochs):
                order = list(range(asked.records))
                chance.shuffle(order)
                for index in order:
                    for one in data[index % len(data)]["annotations"]:
                        sum(one["bbox"]), sum(one["segmentation"][0])
            os.write(done, b".")
            os.read(go, 1)
            os._exit(0)
        pids.append(pid)
    for _ in pids:
        os.read(hear, 1)
    total = pss(os.getpid()) + sum(map(pss, pids))
    os.write(tell, b"." * asked.workers)
    for pid in pids:
        os.waitpid(pid, 0)
    return {"total": total, "size": size}


def in_process(role: str, asked: argparse.Namespace, view: Path) -> Any:
    line = [sys.executable, __file__, "--role", role, "--view", os.fspath(view)]
    records = asked.plain_records if role == "plain" else asked.records
    line += ["--records", str(records), "--workers", str(asked.workers), "--epochs", str(asked.epochs)]
    return json.loads(subprocess.check_output(line, text=True))


def build(records: int, cores: int | None) -> dict[str, float]:
    """In a process of its own: bytes a second of freezing, and of pickle.dumps of the same records."""
    if cores:
        os.sched_setaffinity(0, set(list(os.sched_getaffinity(0))[:cores]))
    data = coco_annotations(records)
    legroom.freeze([0])  # imports are not what is measured
    gc.disable()
    start, worked = time.perf_counter(), time.process_time()
    view = legroom.freeze(data)
    wall, cpu = time.perf_counter() - start, time.process_time() - worked
    start = time.process_time()
    size = sum(len(pickle.dumps(item, protocol=-1)) for item in data)
    pickled = size / (time.process_time() - start)
    return {"wall": view.info.bytes / wall, "cpu": view.info.bytes / cpu, "pickle": pickled}


def attach(view: Path) -> float:
    import ormsgpack  # noqa: F401  imports are not what is measured

    import legroom.cache.freeze  # noqa: F401

    data = view.read_bytes()
    start = time.perf_counter()
    pickle.loads(data)
    return time.perf_counter() - start


def reading(data: Any, indices: list[int]) -> Callable[[], float]:
    def work() -> float:
        start = time.process_time()
        for index in indices:
            data[index]
        return time.process_time() - start

    return work


def speed(asked: argparse.Namespace, disk: Path) -> list[Row]:
    """Building, reading and attaching."""
    one = in_process("build-1", asked, disk)
    subprocess.check_call([sys.executable, "-m", "legroom", "cache", "drop", "--all"], stdout=subprocess.DEVNULL)
    all_cores = in_process("build", asked, disk)
    few = coco_annotations(min(asked.records, 20_000))
    pickled, frozen = PickledList(few), legroom.freeze(few)
    view = disk / "view"
    view.write_bytes(pickle.dumps(frozen))
    indices = random.Random(1).choices(range(len(few)), k=5000)
    seconds = alternate({"frozen": reading(frozen, indices), "pickled": reading(pickled, indices)}, asked.rounds)
    read = {name: min(found) / len(indices) for name, found in seconds.items()}
    attached = sorted(in_process("attach", asked, view) for _ in range(3 * asked.rounds))
    return [
        Row("reading a record : from pickles in a numpy buffer", read["frozen"] / read["pickled"], "×", 1.0,
            note=f"{read['frozen'] * 1e6:.1f} µs and {read['pickled'] * 1e6:.1f} µs of CPU time"),
        Row("building, one core", one["wall"] / 1e6, "MB/s", 200.0, at_least=True,
            note=f"{one['cpu'] / 1e6:.0f} MB per second of CPU time; pickle.dumps alone {one['pickle'] / 1e6:.0f}"),
        Row("building, all cores", all_cores["wall"] / 1e6, "MB/s",
            note=f"{all_cores['cpu'] / 1e6:.0f} MB per second of CPU time"),
        Row("attaching in another process", attached[0] * 1e3, "ms", 1.0,
            note=f"the best of {len(attached)} processes; median {attached[len(attached) // 2] * 1e3:.2f} ms"),
    ]  # fmt: skip


def copies(asked: argparse.Namespace, disk: Path) -> list[Row]:
    """What all processes hold together, relative to one copy."""
    view = disk / "view"
    in_process("freeze", asked, view)
    found = {kind: in_process(kind, asked, view) for kind in ("nothing", "plain", "frozen")}
    base = found["nothing"]["total"]
    each = {kind: (found[kind]["total"] - base) / found[kind]["size"] for kind in ("plain", "frozen")}
    size = found["plain"]["size"] / asked.plain_records * asked.records / 1e9
    return [
        Row(f"copies in all, {asked.workers} workers, {asked.epochs} epochs, plain list", each["plain"], "copies",
            note=f"{asked.plain_records} records, {found['plain']['size'] / 1e9:.2f} GB of Python objects"),
        Row(f"copies in all, {asked.workers} workers, {asked.epochs} epochs, frozen", each["frozen"], "copies", 1.1,
            note=f"{asked.records} records, {found['frozen']['size'] / 1e9:.2f} GB; about {size:.1f} GB as objects"),
    ]  # fmt: skip


PARTS = {"speed": speed, "copies": copies}


def main() -> None:
    parser = argparse.ArgumentParser(description="Frozen annotations, side by side.")
    parser.add_argument("--part", choices=tuple(PARTS), action="append", help="all, if not given")
    parser.add_argument("--records", type=int, default=250_000)
    parser.add_argument("--plain-records", type=int, default=80_000)
    parser.add_argument("--workers", type=int, default=8)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--role", default="")
    parser.add_argument("--view", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.role:
        roles: dict[str, Callable[[], Any]] = {
            "build-1": lambda: build(asked.records, 1),
            "build": lambda: build(asked.records, None),
            "attach": lambda: attach(Path(asked.view)),
            "freeze": lambda: Path(asked.view).write_bytes(
                pickle.dumps(legroom.freeze(coco_annotations(asked.records)))
            ),
        }
        print(json.dumps(roles.get(asked.role, lambda: memory(asked.role, asked))()))
        return
    where = machine("numpy", "ormsgpack")
    print(in_words(where), flush=True)
    parts = kept("freeze", asked.results).get("parts", {})
    with places() as (_, disk):
        for part in asked.part or PARTS:
            rows = PARTS[part](asked, disk)
            print(show(rows), flush=True)
            parts[part] = {"machine": where, "ratios": as_json(rows)}
    parts = {part: parts[part] for part in PARTS if part in parts}
    print(save("freeze", {"machine": where, "parts": parts}, asked.results))


if __name__ == "__main__":
    main()
