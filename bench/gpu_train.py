"""Training on a GPU with each way to load, against the same training on a batch that is already there.

    PYTHONPATH=src python3 bench/gpu_train.py [--rounds 4] [--only cnn-150k,tokens-8k,…] [--seconds 220]

A model is trained on batches of one dataset. "no loading" trains on one batch in GPU memory and is the limit. The paths
take turns, and a figure is the best of the rounds. The DataLoaders come last, one round each, while there is time. The
table has steps a second as a share of the limit. The result goes to $OUT/gpu_train.json where OUT is set, else to
bench/results/.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import legroom
from measure import Row, alternate, as_json, gpu_machine, places, save, show

PATHS = ("cuda-copy-engine", "cuda-kernel", "cuda-registered", "cuda-pinned")
TODAY = "cuda-registered"  # the only path before the copy engines


@dataclass(frozen=True)
class Task:
    """What is trained on what."""

    name: str
    row: tuple[int, ...]
    dtype: Any
    rows: int
    batch: int
    steps: int
    model: Callable[[], nn.Module]
    target: float  # least share of the speed without loading
    images: bool = True


class Patches(nn.Module):
    """A small convolutional network that looks at large images: its step is about three times the transfer."""

    def __init__(self, size: int, width: int = 96) -> None:
        super().__init__()
        side = 14
        self.patches = nn.Conv2d(3, width, size // side, size // side)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.GELU()) for _ in range(4))
        )
        self.head = nn.Linear(width, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        seen = self.patches(images.to(torch.bfloat16).div_(255).to(memory_format=torch.channels_last))
        found: torch.Tensor = self.head(self.blocks(seen).mean((2, 3)))
        return found


class Tokens(nn.Module):
    """A small transformer on rows of tokens."""

    def __init__(self, width: int = 64, layers: int = 1) -> None:
        super().__init__()
        self.embed = nn.Embedding(4096, width)
        layer = nn.TransformerEncoderLayer(width, 2, 2 * width, batch_first=True, dropout=0.0)
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.head(self.layers(self.embed(tokens & 4095)).mean(1))
        return found


class Features(nn.Module):
    """A multilayer perceptron on rows of precomputed features: much data for little work."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(features, width), nn.GELU(), nn.Linear(width, width), nn.GELU(), nn.Linear(width, 10)
        )

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.layers(features)
        return found


def tasks() -> list[Task]:
    """Rows from 2 kB to 150 kB."""
    return [
        Task("cnn-150k", (3, 224, 224), np.uint8, 10_000, 256, 100, lambda: Patches(224, 256), 0.98),
        Task("cnn-150k-short-step", (3, 224, 224), np.uint8, 10_000, 256, 120, lambda: Patches(224), 0.98),
        Task("cnn-32k", (3, 104, 104), np.uint8, 40_000, 1024, 80, lambda: Patches(104, 128), 0.98),
        Task("features-8k", (4096,), np.float16, 60_000, 4096, 150, lambda: Features(4096, 4096), 0.93, images=False),
        Task("features-2k", (1024,), np.float16, 200_000, 16384, 60, lambda: Features(1024, 2048), 0.93, images=False),
        # The same rows with two to three times the work per row: less than half of the link's rate.
        Task(
            "features-8k-long-step",
            (4096,),
            np.float16,
            60_000,
            4096,
            70,
            lambda: Features(4096, 8192),
            0.93,
            images=False,
        ),
        Task(
            "features-2k-long-step",
            (1024,),
            np.float16,
            200_000,
            16384,
            40,
            lambda: Features(1024, 4096),
            0.93,
            images=False,
        ),
        Task("tokens-8k", (1024,), np.int64, 40_000, 512, 60, Tokens, 0.93, images=False),
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description="Training with each way to load, against training without loading.")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--only", default="")
    parser.add_argument("--seconds", type=float, default=220, help="start no measurement of a DataLoader after this")
    asked = parser.parse_args()
    where = gpu_machine()
    found: dict[str, Any] = {}
    begun = time.perf_counter()
    chosen = [task for task in tasks() if not asked.only or task.name in asked.only.split(",")]
    with places() as (memory, _):
        for part in (measure_paths, measure_loaders):
            for task in chosen:
                if part is measure_loaders and time.perf_counter() - begun > asked.seconds:
                    break
                start = time.perf_counter()
                part(task, source(task, memory), asked.rounds, found.setdefault(task.name, {}))
                print(f"{task.name}: {time.perf_counter() - start:.1f} s", found[task.name], flush=True)
                rows = [row for one in chosen if one.name in found for row in table(one, found[one.name])]
                path = save("gpu_train", {"machine": where, "ratios": as_json(rows), "tasks": found})
    print(show(rows))
    print(path)


def source(task: Task, folder: Path) -> Path:
    """The file of the task's rows. Their values repeat after some thousand rows, which changes no figure."""
    path = folder / f"{task.rows}x{'x'.join(map(str, task.row))}-{np.dtype(task.dtype)}.npz"
    if not path.exists():
        some = np.random.default_rng(1).integers(0, 255, (1000, *task.row), np.uint8).astype(task.dtype)
        labels = np.random.default_rng(2).integers(0, 10, task.rows)
        np.savez(path, inputs=np.concatenate([some] * (task.rows // len(some))), labels=labels)
    return path


def measure_paths(task: Task, path: Path, rounds: int, found: dict[str, Any]) -> None:
    """Steps a second of each path, and the one that was chosen."""
    step = trainer(task)
    with legroom.open(path, backing="shm") as data:
        data.ready()
        options: dict[str, Any] = {"shuffle": True, "device": "cuda"}
        chosen = data.batches(task.batch, **options)
        kept = next(iter(chosen))
        speed(task, step, _epochs(chosen), 320)  # the paths are compared: 200 batches, after 80 if they were before
        found |= {"chosen": chosen.path, "why": chosen.why, "launch_share": launch_share(task, step, kept)}
        contenders: dict[str, Callable[[], Iterator[Any]]] = {"no loading": lambda: _endless(kept)}
        for name in PATHS:
            batches = data.batches(task.batch, **options, path=name)
            contenders[name] = partial(_epochs, batches)
        resident = data.batches(task.batch, **options, resident=True)
        contenders["cuda-resident"] = lambda: _epochs(resident)
        speeds = alternate(
            {name: partial(lambda make: speed(task, step, make()), make) for name, make in contenders.items()}, rounds
        )
    found["steps_per_second"] = {name: max(values) for name, values in speeds.items()}
    found["all_steps_per_second"] = speeds


def measure_loaders(task: Task, path: Path, rounds: int, found: dict[str, Any]) -> None:
    """Steps a second of the DataLoaders."""
    step = trainer(task)
    kinds: tuple[tuple[str, Any], ...] = (
        ("legroom.DataLoader", legroom.DataLoader),
        ("torch DataLoader", torch.utils.data.DataLoader),
    )
    with legroom.open(path, backing="shm") as data:
        for name, kind in kinds:
            loader = kind(
                data.dataset("inputs", "labels"), task.batch, shuffle=True, num_workers=8, pin_memory=True,
                persistent_workers=True, drop_last=True,
            )  # fmt: skip
            found["steps_per_second"][name] = speed(task, step, _moved(loader), min(40, task.steps))
            del loader


def trainer(task: Task) -> Callable[[Any, Any], None]:
    """One training step, captured in no graph: as people write it."""
    torch.manual_seed(0)
    model = task.model().to("cuda", torch.bfloat16)
    if task.images:
        model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload] # torch's types do not name it
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loss_of = nn.CrossEntropyLoss()

    def step(inputs: torch.Tensor, labels: torch.Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        loss_of(model(inputs.to(torch.bfloat16) if inputs.is_floating_point() else inputs), labels).backward()
        optimizer.step()

    return step


def launch_share(task: Task, step: Callable[[Any, Any], None], batch: Any) -> float:
    """How much of a step's time the CPU takes to launch it; near 1 the GPU waits for the CPU."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(task.steps):
        step(batch["inputs"], batch["labels"])
    launched = time.perf_counter() - start
    torch.cuda.synchronize()
    return launched / (time.perf_counter() - start)


def speed(task: Task, step: Callable[[Any, Any], None], batches: Iterator[Any], steps: int = 0) -> float:
    """Steps a second, after some to warm up."""
    steps = steps or task.steps
    for _ in range(10):
        batch = next(batches)
        step(batch["inputs"], batch["labels"])
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(steps):
        batch = next(batches)
        step(batch["inputs"], batch["labels"])
    torch.cuda.synchronize()
    return steps / (time.perf_counter() - start)


def _endless(batch: Any) -> Iterator[Any]:
    while True:
        yield batch


def _epochs(batches: Any) -> Iterator[Any]:
    while True:
        yield from batches


def _moved(loader: Any) -> Iterator[Any]:
    for batch in _epochs(loader):
        inputs, labels = (part.to("cuda", non_blocking=True) for part in batch)
        yield {"inputs": inputs, "labels": labels}


def table(task: Task, found: dict[str, Any]) -> list[Row]:
    """The shares of one task; only the chosen path has a target, and only where today's path leaves room for one."""
    lines = []
    speeds = found["steps_per_second"]
    limit = speeds["no loading"]
    for name, rate in speeds.items():
        chosen = name == found["chosen"]
        target = task.target if chosen and speeds[TODAY] <= 0.92 * limit else None
        note = f"{rate:.1f} steps/s{', chosen' if chosen else ''}"
        lines.append(Row(f"{task.name}: {name} : no loading", rate / limit, "×", target, at_least=True, note=note))
    best = max(PATHS, key=speeds.__getitem__)
    share = speeds[found["chosen"]] / speeds[best]
    lines.append(Row(f"{task.name}: chosen path : best path", share, "×", 0.97, at_least=True, note=best))
    return lines


if __name__ == "__main__":
    main()
