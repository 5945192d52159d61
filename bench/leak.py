"""What `legroom leak` costs: the same training loop with and without recording.

    python bench/leak.py                       steps of 20 ms and of 2 ms
    python bench/leak.py --step-ms 5 --seconds 60

The model is trained on the CPU in every step, and the rest of the step is CPU work of a fixed amount, not sleep. In one
process blocks of about a second alternate, with and without recording; a block with recording goes on until no window
of tracemalloc is open. What is compared is the CPU time of the process, all threads together: other programs change the
wall time by more than the effect. The cost comes in few steps, so the ratio is that of the sums, with an interval from
10,000 resamplings of the pairs; the median of the ratios of the pairs shows what most seconds cost. Then whole runs of
the command alternate, with and without `legroom leak`; a short run pays up to 1.2 s more, which are allowed once.
"""

from __future__ import annotations

import argparse
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from legroom.leak.memory_recorder import Recorder
from measure import RESULTS, Row, alternate, as_json, in_words, machine, save, show

BLOCK_S = 1.0
WARM_UP_S = 8.0  # of steps, before the first pair


def make_step(products: int) -> Callable[[], None]:
    """A training step with so many products of matrices besides."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 128), torch.randint(10, (64,))
    matrix = torch.randn(128, 128)
    losses: list[float] = []

    def train() -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for _ in range(products):
            matrix @ matrix

    for _ in range(20):
        train()
    return train


def products_for(milliseconds: float) -> int:
    """How many products make a step of about this length on an idle core."""
    products, took = 0, 0.0
    while took < milliseconds / 1000:
        products += max(1, products // 4)
        step = make_step(products)
        took = block(step, 5).cpu / 5
    return products


class Block(NamedTuple):
    """Steps that were run one after the other."""

    steps: int
    cpu: float  # seconds of all threads of the process
    wall: float


def block(step: Callable[[], None], count: int, goes_on: Callable[[], bool] = lambda: False) -> Block:
    """So many steps, and more while it goes on."""
    done, began, cpu = 0, time.perf_counter(), time.process_time()
    while done < count or goes_on():
        step()
        done += 1
    return Block(done, time.process_time() - cpu, time.perf_counter() - began)


def ratio(pairs: Sequence[tuple[Block, Block]], read: Callable[[Block], float]) -> float:
    """Time per step with recording, relative to that without."""
    on, off = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
    return (sum(map(read, on)) / sum(one.steps for one in on)) / (sum(map(read, off)) / sum(one.steps for one in off))


def interval(pairs: Sequence[tuple[Block, Block]]) -> tuple[float, float]:
    """Within which the ratio of CPU times lies with a probability of 95%: from resampled pairs."""
    chance = random.Random(0)
    found = sorted(ratio(chance.choices(pairs, k=len(pairs)), lambda one: one.cpu) for _ in range(10_000))
    return found[250], found[-251]


def steady(milliseconds: float, products: int, seconds: float) -> Row:
    """The slowdown after the first seconds."""
    step = make_step(products)
    count = max(1, round(1000 * BLOCK_S / milliseconds))
    pairs: list[tuple[Block, Block]] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder)
        recorder.start()
        block(
            step, round(1000 * WARM_UP_S / milliseconds), lambda: recorder.window_open
        )  # uses up what a short run may
        for number in range(max(5, round(seconds / BLOCK_S / 2))):

            def with_recording() -> Block:
                recorder.running = True
                found = block(step, count, lambda: recorder.window_open)
                recorder.running = False
                return found

            def without() -> Block:
                recorder.running = False
                paused = time.monotonic()
                found = block(step, count)
                recorder.skip(time.monotonic() - paused, found.cpu)  # its share is one of the recorded time
                return found

            if number % 2:  # the order alternates too: what drifts adds to both
                on, off = with_recording(), without()
            else:
                off, on = without(), with_recording()
            pairs.append((on, off))
        recorder.running = True
        recorder.stop()
    low, high = interval(pairs)
    each = statistics.median(ratio([pair], lambda one: one.cpu) for pair in pairs)
    return Row(
        f"steps of {milliseconds:g} ms, CPU time with : without legroom leak", ratio(pairs, lambda one: one.cpu), "×",
        1.05 if milliseconds >= 20 else None,
        note=f"95% between {low:.3f} and {high:.3f}; {len(pairs)} pairs of blocks, their median {each:.3f}; "
        f"wall time {ratio(pairs, lambda one: one.wall):.3f}",
    )  # fmt: skip


def whole(milliseconds: float, products: int, seconds: float, rounds: int) -> Row:
    """The slowdown of whole runs of the command, by the CPU time of the process from its first step to its last."""
    line = [sys.executable, __file__, "--role", "train", "--step-ms", str(milliseconds), "--seconds", str(seconds)]
    line += ["--products", str(products)]
    leak = [sys.executable, "-m", "legroom", "leak", "--quiet", "--json", "--"]

    def run(command: list[str]) -> float:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float((done.stdout + done.stderr).partition("per step: ")[2].split()[0])

    found = alternate({"with": lambda: run([*leak, *line]), "without": lambda: run(line)}, rounds)
    ratios = sorted(on / off for on, off in zip(found["with"], found["without"], strict=True))
    return Row(
        f"a run of {seconds:g} s with steps of {milliseconds:g} ms, CPU time with : without", statistics.median(ratios),
        "×", note=f"median of {rounds} pairs of runs, {ratios[0]:.3f} to {ratios[-1]:.3f}; up to 1.2 s of it once",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-ms", type=float, nargs="*", default=[20.0, 2.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each length of a step")
    parser.add_argument("--rounds", type=int, default=2, help="of whole runs")
    parser.add_argument("--role", default="")
    parser.add_argument("--products", type=int, default=0, help="of a step, with --role")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.role:
        found = block(make_step(asked.products), round(asked.seconds * 1000 / asked.step_ms[0]))
        print(f"per step: {found.cpu / found.steps} s")
        return
    where = machine("torch")
    print(in_words(where), flush=True)
    products = {milliseconds: products_for(milliseconds) for milliseconds in asked.step_ms}
    rows = [steady(milliseconds, products[milliseconds], asked.seconds) for milliseconds in asked.step_ms]
    print(show(rows), flush=True)
    if asked.rounds:
        first = asked.step_ms[0]
        rows.append(whole(first, products[first], asked.seconds / 2, asked.rounds))
    print(show(rows))
    print(save("leak", {"machine": where, "ratios": as_json(rows)}, asked.results))


if __name__ == "__main__":
    main()
