"""What `legroom leak` costs: the same training loop with and without recording.

    python bench/leak.py                       steps of 20 ms and of 2 ms
    python bench/leak.py --step-ms 5 --seconds 60

The model is trained on the CPU in every step, and the rest of the step is CPU work of a fixed amount, not sleep, so
that a slowdown cannot hide in a pause. In one process turns of two seconds alternate, and the mean of each kind is
compared: samples and windows fall into few turns. Then whole runs of the command alternate, with and without
`legroom leak`; a short run pays up to 1.2 s more, which are allowed once.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from legroom.leak.in_process import Recorder
from measure import RESULTS, Row, alternate, as_json, in_words, machine, save, show

TURN_S = 2.0


def make_step(milliseconds: float) -> Callable[[], None]:
    """A training step of about this length on an idle core."""
    torch.set_num_threads(1)
    model = nn.Sequential(nn.Linear(128, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    x, y = torch.randn(64, 128), torch.randint(10, (64,))
    matrix = torch.randn(128, 128)
    losses: list[float] = []

    def train(products: int) -> None:
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for _ in range(products):
            matrix @ matrix

    for _ in range(20):
        train(0)
    products, took = 0, 0.0
    while took < milliseconds / 1000:
        products += max(1, products // 4)
        began = time.thread_time()
        for _ in range(5):
            train(products)
        took = (time.thread_time() - began) / 5
    return lambda: train(products)


def turn(step: Callable[[], None], seconds: float) -> tuple[float, float]:
    """Seconds per step, by the clock and of CPU time of this thread."""
    count, began, cpu = 0, time.perf_counter(), time.thread_time()
    while time.perf_counter() - began < seconds:
        step()
        count += 1
    return (time.perf_counter() - began) / count, (time.thread_time() - cpu) / count


def steady(milliseconds: float, seconds: float) -> Row:
    """The slowdown after the first seconds."""
    step = make_step(milliseconds)
    plain: list[tuple[float, float]] = []
    recorded: list[tuple[float, float]] = []
    with tempfile.TemporaryDirectory() as folder:
        recorder = Recorder(folder)
        recorder.start()
        turn(step, 3 * TURN_S)  # the credit of a short run is used up here
        recorder.running = False
        for _ in range(max(3, round(seconds / TURN_S / 2))):
            paused = time.monotonic()
            plain.append(turn(step, TURN_S))
            recorder.running = True
            recorder.skip(time.monotonic() - paused)  # its share is one of the recorded time
            recorded.append(turn(step, TURN_S))
            recorder.running = False
        recorder.running = True
        recorder.stop()
    (clock, cpu), (median, _) = (
        [read(one[at] for one in recorded) / read(one[at] for one in plain) for at in (0, 1)]
        for read in (statistics.mean, statistics.median)
    )
    return Row(
        f"steps of {milliseconds:g} ms, with : without legroom leak", clock, "×", 1.05 if milliseconds >= 20 else None,
        note=f"mean of {len(plain)} turns each; median {median:.3f}, CPU time of the thread {cpu:.3f}",
    )  # fmt: skip


def whole(milliseconds: float, seconds: float, rounds: int) -> Row:
    """The slowdown of whole runs of the command, the best of each kind."""
    line = [sys.executable, __file__, "--role", "train", "--step-ms", str(milliseconds), "--seconds", str(seconds)]
    leak = [sys.executable, "-m", "legroom", "leak", "--quiet", "--json", "--"]

    def run(command: list[str]) -> float:
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        return float((done.stdout + done.stderr).partition("per step: ")[2].split()[0])

    found = alternate({"with": lambda: run([*leak, *line]), "without": lambda: run(line)}, rounds)
    return Row(
        f"a run of {seconds:g} s with steps of {milliseconds:g} ms, with : without",
        min(found["with"]) / min(found["without"]), "×",
        note=f"the best of {rounds} runs each; up to 1.2 s of it once for short runs",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--step-ms", type=float, nargs="*", default=[20.0, 2.0])
    parser.add_argument("--seconds", type=float, default=60.0, help="for each length of a step")
    parser.add_argument("--rounds", type=int, default=2, help="of whole runs")
    parser.add_argument("--role", default="")
    parser.add_argument("--results", type=Path, default=RESULTS)
    asked = parser.parse_args()
    if asked.role:
        step = make_step(asked.step_ms[0])
        count = round(asked.seconds * 1000 / asked.step_ms[0])
        began = time.perf_counter()
        for _ in range(count):
            step()
        print(f"per step: {(time.perf_counter() - began) / count} s")
        return
    where = machine("torch")
    print(in_words(where), flush=True)
    rows = [steady(milliseconds, asked.seconds) for milliseconds in asked.step_ms]
    print(show(rows), flush=True)
    if asked.rounds:
        rows.append(whole(asked.step_ms[0], asked.seconds / 2, asked.rounds))
    print(show(rows))
    print(save("leak", {"machine": where, "ratios": as_json(rows)}, asked.results))


if __name__ == "__main__":
    main()
