"""GPUs × jobs experiments at once on one copy of the data: as many as `legroom plan` says fit, and what they took.

    python run_experiments.py [--gpus 8] [--jobs_per_gpu 6] [--data train.h5 | --size 200MB] [--separate]

One experiment is started and measured; the plan is made from that; then the others start. Without ``--data`` the data
are made in a place of their own, and everything goes at the end.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import stripes
import summary

import legroom
from legroom.messages import either
from legroom.records.workload import Plan
from legroom.units import format_size, parse_size

EXPERIMENT = Path(__file__).with_name("experiment.py")
# Each experiment has its own; after the last, the first again with another seed.
RATES = (0.003, 0.001, 0.01, 0.0003, 0.03, 0.1)
DISK = "/var/tmp"  # for data that are made here


class Experiment:
    """An experiment in a process of its own: started at once, ended with its ``with`` block."""

    def __init__(self, path: Path, number: int, card: int, steps: int, environment: dict[str, str]) -> None:
        self.number, self.card = number, card
        self.rate, self.seed = RATES[number % len(RATES)], number // len(RATES)
        command = [sys.executable, EXPERIMENT, "--h5", path, "--lr", self.rate, "--seed", self.seed]
        self.process = subprocess.Popen(
            [*map(str, command), "--steps", str(steps), "--wait"],
            env={**environment, "CUDA_VISIBLE_DEVICES": visible(card)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        self.told: dict[str, float | str | None] = {}

    def listen(self) -> None:
        """Wait for its next line; one that ended instead has said why on stderr, unless it was killed."""
        line = self.process.stdout.readline()
        if not line:
            status = self.process.wait()
            sys.exit(status if status > 0 else f"experiment {self.number} ended early, with status {status}")
        self.told |= json.loads(line)

    def go_on(self) -> None:
        try:
            self.process.stdin.write("\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            pass  # it is gone: listening to it says so

    def __enter__(self) -> Experiment:
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()  # no effect on one that has finished
        self.process.communicate()


def visible(card: int) -> str:
    """That card alone, of those this process may use."""
    cards = os.environ.get("CUDA_VISIBLE_DEVICES")
    return str(card) if cards is None else cards.split(",")[card % (cards.count(",") + 1)]


def run(path: Path, flags: argparse.Namespace, *, shared: bool = True) -> summary.Outcome:
    """Start one, plan, start the others, measure all at one moment, let them finish."""
    asked = (flags.gpus or 1) * flags.jobs_per_gpu
    environment = {**os.environ, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // asked))}
    if not shared:
        environment["LEGROOM_DISABLE"] = "1"
    with ExitStack() as stack:

        def start(number: int, card: int) -> Experiment:
            return stack.enter_context(Experiment(path, number, card, flags.steps, environment))

        first = start(0, 0)
        first.listen()
        plan = plan_from(first, flags)
        jobs = flags.jobs_per_gpu if plan.fits_now is None else min(flags.jobs_per_gpu, plan.fits_now)
        print(summary.plan_text(plan, jobs), flush=True)
        if jobs == 0:
            sys.exit(1)
        experiments = [first, *(start(number, number % plan.gpus) for number in range(1, plan.gpus * jobs))]
        for experiment in experiments[1:]:
            experiment.listen()
        measured = legroom.plan(gpus=plan.gpus, measure=[one.process.pid for one in experiments]).measured
        held = {job.pid: job.held["ram"] for job in measured}
        for experiment in experiments:
            experiment.go_on()
        for experiment in experiments:
            experiment.listen()
    rows = [
        summary.Row(
            number=one.number, card=one.card, rate=one.rate, seed=one.seed,
            opened=one.told["opened"], held=held[one.process.pid], accuracy=one.told["accuracy"],
        )
        for one in experiments
    ]  # fmt: skip
    return summary.Outcome(rows, data_bytes=first.told["bytes"], backing=first.told["backing"])


def plan_from(first: Experiment, flags: argparse.Namespace) -> Plan:
    """What GPUs × jobs like the running one need here."""
    asked = {"gpus": flags.gpus, "jobs_per_gpu": flags.jobs_per_gpu, "gpu_bytes": first.told["gpu"]}
    return legroom.plan(measure=[first.process.pid], **asked)


@contextmanager
def own_data(size: int) -> Iterator[Path]:
    """Data of that size, with stores of their own; all of it goes at the end."""
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="legroom-experiments-", dir=memory) as shm,
        tempfile.TemporaryDirectory(prefix="legroom-experiments-", dir=DISK) as disk,
    ):
        os.environ.update(LEGROOM_SHM=shm, LEGROOM_DIR=disk)
        path = Path(disk, "stripes.h5")
        stripes.write(path, size)
        time.sleep(2.1)  # a file that has just changed is hashed at every opening, to be safe
        yield path


def size(text: str) -> int:
    try:
        return parse_size(text)
    except legroom.LegroomError as problem:
        raise argparse.ArgumentTypeError(str(problem)) from problem


def main() -> None:
    parser = argparse.ArgumentParser(
        description=either(
            "Run GPUs × jobs experiments at once on one copy of the data.",
            "在一份数据上同时运行 显卡数 × 任务数 个实验。",
        )
    )
    parser.add_argument(
        "--gpus", type=int, help=either("default: counted; 1 where there is none", "默认自动检测；没有显卡时为 1")
    )
    parser.add_argument(
        "--jobs_per_gpu",
        type=int,
        default=6,
        help=either("at most so many on each (default 6)", "每张显卡最多的任务数（默认 6）"),
    )
    parser.add_argument(
        "--data",
        type=Path,
        help=either(
            "an HDF5 file of images and labels; its copy stays", "含 images 和 labels 的 HDF5 文件；共享副本会保留"
        ),
    )
    parser.add_argument(
        "--size",
        type=size,
        default="200MB",
        help=either("of data made here (default 200MB)", "自动生成的数据大小（默认 200MB）"),
    )
    parser.add_argument(
        "--steps", type=int, default=100, help=either("of each experiment (default 100)", "每个实验的步数（默认 100）")
    )
    parser.add_argument(
        "--separate",
        action="store_true",
        help=either("then measure all with a copy each, too", "再测量每个实验各用一份数据的情况"),
    )
    flags = parser.parse_args()
    if min(flags.jobs_per_gpu, flags.gpus or 1) < 1 or flags.gpus == 0 or flags.steps < 2:
        parser.error(
            either(
                "--gpus and --jobs_per_gpu must be 1 or more, --steps 2 or more",
                "--gpus 和 --jobs_per_gpu 至少为 1，--steps 至少为 2",
            )
        )
    if sys.platform != "linux":
        parser.error(
            either("this reads what processes hold from /proc: it needs Linux", "需要 Linux：从 /proc 读取进程占用")
        )
    free = shutil.disk_usage(DISK).free
    if not flags.data and flags.size >= free:
        parser.error(
            either(
                f"--size is {format_size(flags.size)}, and {DISK} has {format_size(free)} free",
                f"--size 为 {format_size(flags.size)}，而 {DISK} 只剩 {format_size(free)}",
            )
        )
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # or experiments and data would stay behind
    with ExitStack() as stack:
        path = flags.data or stack.enter_context(own_data(flags.size))
        try:
            print(summary.outcome_text(run(path, flags)))
            if flags.separate:
                print(either("\nThe same with a copy each:", "\n每个实验各用一份数据："))
                print(summary.outcome_text(run(path, flags, shared=False)))
        except legroom.LegroomError as error:
            print(error, file=sys.stderr)
            sys.exit(error.exit_status)


if __name__ == "__main__":
    main()
