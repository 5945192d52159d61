"""Four processes, one copy: makes a small dataset, opens it in each, and prints what was measured just now.

    python examples/first_look/first_look.py [--size 200MB] [--processes 4]

Everything it makes is in directories of its own and goes when it ends.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from legroom.units import format_duration, format_size, parse_size

ROW = (256, 256, 3)

# What each "training" does: open, look at every row, say what it took, wait for the others.
TRAINING = """
import sys, time
import numpy as np
import legroom

open_data = legroom.open  # imported now, not while the clock runs
started = time.perf_counter()
data = open_data(sys.argv[1])
opened = time.perf_counter() - started
total = int(data["images"].sum(dtype=np.int64))
print(opened, total, flush=True)
sys.stdin.read()
"""


def make_dataset(path: Path, size: int) -> None:
    """An HDF5 file of random images."""
    import h5py
    import numpy as np

    rows = max(1, size // (ROW[0] * ROW[1] * ROW[2]))
    random = np.random.default_rng(0)
    with h5py.File(path, "w") as file:
        images = file.create_dataset("images", (rows, *ROW), dtype=np.uint8)
        for start in range(0, rows, 64):
            count = min(64, rows - start)
            images[start : start + count] = random.integers(0, 256, (count, *ROW), dtype=np.uint8)
    # A file that has just changed is hashed again at every opening, to be safe; this one will not change again.
    long_ago = time.time() - 60
    os.utime(path, (long_ago, long_ago))


def pss(pid: int) -> int:
    """What a process holds of RAM, its share of shared pages counted by how many share them."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) * 1024
    return 0


def start(path: Path) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", TRAINING, str(path)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=parse_size, default="200MB", help="bytes of data (default 200MB)")
    parser.add_argument("--processes", type=int, default=4, help="trainings at once (default 4)")
    wanted = parser.parse_args()
    if sys.platform != "linux":
        sys.exit("this example reads /proc: it needs Linux")
    if wanted.processes < 1:
        parser.error("--processes must be at least 1")
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
    with (
        tempfile.TemporaryDirectory(prefix="legroom-first-look-", dir=memory) as shm,
        tempfile.TemporaryDirectory(prefix="legroom-first-look-", dir="/var/tmp") as disk,
    ):
        os.environ.update(LEGROOM_SHM=shm, LEGROOM_DIR=disk)
        look(Path(disk) / "train.h5", wanted.size, wanted.processes)


def look(path: Path, size: int, count: int) -> None:
    make_dataset(path, size)
    time.sleep(2.1)  # until the file counts as quiet
    trainings = [start(path) for _ in range(count)]
    try:
        answers = [training.stdout.readline().split() for training in trainings if training.stdout]
        late = start(path)
        trainings.append(late)
        answers.append(late.stdout.readline().split() if late.stdout else [])
        held = [pss(training.pid) for training in trainings]
    finally:
        for training in trainings:
            training.communicate()
    if not all(len(answer) == 2 for answer in answers):
        sys.exit("a process did not open the data; its error is above")
    data = path.stat().st_size
    rows = {
        "dataset": f"{format_size(data)} of HDF5",
        f"{count} processes at once": f"all had it after {format_duration(max(float(a[0]) for a in answers[:-1]))}",
        "one more, later": f"had it after {format_duration(float(answers[-1][0]))}",
        "same data in all": "yes" if len({answer[1] for answer in answers}) == 1 else "NO",
        f"RAM of all {len(held)}": f"{format_size(sum(held))}, interpreters included",
        "separate copies": f"would take {format_size(len(held) * data)} for the data alone",
    }
    for name, value in rows.items():
        print(f"{name:<24}{value}")


if __name__ == "__main__":
    main()
