"""Count the modules that run on three journeys through the code, by tracing.

python tests/release/journeys.py            print the figures
python tests/release/journeys.py --files    and every module
python tests/release/journeys.py --write    put the figures into docs/architecture.md

A module counts when one of its functions is called in any process of the journey; code that runs only at import does
not. The third journey needs root and a memory cgroup, and is left out elsewhere.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

REPO = Path(__file__).parents[2]
SOURCE = str(REPO / "src" / "legroom") + os.sep
PAGE = REPO / "docs" / "architecture.md"
LIMIT = 400 << 20
JOURNEYS = {
    "open": "`legroom.open` of a new file, to the first CPU batch",
    "batch": "one batch from a DataLoader worker to the training process",
    "first_batch": "the same with the loader's start",
    "restart": "a supervised job that is OOM-killed and restarted",
}

JOB = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("--batch_size", type=int)
parser.add_argument("--accum_iter", type=int)
given = parser.parse_args()
held = b"x" * (given.batch_size << 24)
"""


class Trace:
    """Write each module once per phase and process to a file that all processes append to."""

    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        self._phase = "trace"
        self._seen: set[str] = set()

    def start(self) -> None:
        threading.setprofile(self._called)
        sys.setprofile(self._called)

    def phase(self, name: str) -> None:
        if name != self._phase:
            self._phase, self._seen = name, set()

    def _called(self, frame: FrameType, event: str, _: object, source: str = SOURCE) -> None:
        name = frame.f_code.co_filename
        if event != "call" or not name.startswith(source) or name in self._seen or _importing(frame):
            return
        self._seen.add(name)
        os.write(self._file, f"{self._phase}\t{name.removeprefix(SOURCE)}\n".encode())


def _importing(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_code.co_filename.startswith(SOURCE):
        if frame.f_code.co_name == "<module>":
            return True
        frame = frame.f_back
    return False


def journey_open(trace: Trace) -> None:
    import numpy as np
    import torch  # noqa: F401

    import legroom

    np.save("data.npy", np.zeros((64, 32, 32), np.float32))
    trace.start()
    with legroom.open("data.npy") as data:
        next(iter(data.batches(16, shuffle=True)))


def journey_batch(trace: Trace) -> None:
    import torch

    import legroom

    class Samples(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 512

        def __getitem__(self, index: int) -> torch.Tensor:
            if index >= 256:  # the worker is running, and its first batches are sent
                trace.phase(f"batch {index // 16}")
            return torch.full((3, 32, 32), index, dtype=torch.float32)

    trace.start()
    for number, _ in enumerate(legroom.DataLoader(Samples(), batch_size=16, num_workers=1)):
        if number >= 16:
            trace.phase(f"batch {number}")
        if number == 27:
            os._exit(0)  # what ends a loader is not part of a batch's way


def journey_restart(trace: Trace) -> None:
    Path("job.py").write_text(JOB, encoding="utf-8")
    from legroom.cli.main import main

    trace.start()
    job = [sys.executable, "job.py", "--batch_size", "32", "--accum_iter", "1"]
    main(["run", "--retries", "2", "--", *job])


def measured(name: str, folder: Path) -> list[tuple[str, str]]:
    """Phase and module of everything that was called, in a fresh interpreter."""
    trace = folder / f"{name}.trace"
    command = [sys.executable, __file__, "--journey", name, str(trace)]
    environment = os.environ | {
        "LEGROOM_SHM": str(folder), "LEGROOM_DIR": str(folder), "XDG_STATE_HOME": str(folder), "LEGROOM_LANG": "en",
    }  # fmt: skip
    if name != "restart":
        subprocess.run(command, cwd=folder, env=environment, check=True)
    else:
        sys.path.insert(0, str(REPO / "tests"))
        import rigs

        if why := rigs.why_not_cgroup():
            print(f"{name}: left out: {why}")
            return []
        with rigs.memory_cgroup(LIMIT) as group:
            done = subprocess.run(group.command(command), cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0 and "ram-oom-kill" in done.stderr and "attempt 2" in done.stderr, done.stderr
    lines = trace.read_text(encoding="utf-8").splitlines()
    return [(phase, module) for phase, module in (line.split("\t") for line in lines)]


def main() -> None:
    found: dict[str, list[str]] = {}
    with tempfile.TemporaryDirectory(prefix="journeys-") as folder:
        runs = {name: measured(name, Path(folder)) for name in ("open", "batch", "restart")}
    runs["first_batch"] = runs["batch"]
    # What is done now and then (reading free memory, for instance) is not in every batch: the median batch counts.
    batches = [[one for one in runs["batch"] if one[0] == f"batch {number}"] for number in range(17, 26)]
    runs["batch"] = sorted(batches, key=lambda calls: len({module for _, module in calls}))[len(batches) // 2]
    for name, title in JOURNEYS.items():
        found[name] = sorted({module for _, module in runs[name]})
        print(f"{len(found[name]):3} modules: {title}")
        if "--files" in sys.argv:
            print("    " + "\n    ".join(found[name]))
    if "--write" in sys.argv:
        assert all(found.values()), "a journey could not be measured here"
        rows = [f"| {title} | {len(found[name])} |" for name, title in JOURNEYS.items()]
        table = "\n".join(["| journey | modules |", "| --- | --- |", *rows])
        text = PAGE.read_text(encoding="utf-8")
        marks = r"(<!-- journeys:begin -->\n).*?(<!-- journeys:end -->)"
        PAGE.write_text(re.sub(marks, rf"\g<1>{table}\n\g<2>", text, flags=re.S), encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["--journey"]:
        sys.path.insert(0, str(REPO / "src"))
        globals()[f"journey_{sys.argv[2]}"](Trace(sys.argv[3]))
    else:
        main()
