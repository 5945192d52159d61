"""`legroom leak` on whole jobs: several ranks, launchers, spawned and forked workers, scripts that trace themselves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

few_samples = pytest.mark.load_sensitive(reason="steps of a few ms: a pause of the process leaves too few samples")

TRAIN = """
import os, time, torch
from torch import nn
model = nn.Linear(32, 32)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
history = []
for number in range(110):
    optimizer.zero_grad()
    out = model(torch.randn(64, 32))
    out.sum().backward()
    optimizer.step()
    history.append(out.detach().repeat(4, 1))
    time.sleep(0.004)
"""

WORKERS = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Keeps(Dataset):
    def __init__(self):
        self.seen = []
    def __len__(self):
        return 440
    def __getitem__(self, index):
        sample = torch.randn(2000)
        self.seen.append(sample)
        return sample.sum()
if __name__ == "__main__":
    for batch in DataLoader(Keeps(), batch_size=4, num_workers=1, multiprocessing_context="METHOD"):
        time.sleep(0.004)
"""

FORKS = """
import os, time, legroom
def work():
    kept = []
    for number in range(150):
        kept.append(bytearray(30_000))
        legroom.step()
        time.sleep(0.004)
child = os.fork()
if child == 0:
    work()
    os._exit(0)
os.waitpid(child, 0)
"""

TRACES = """
import time, tracemalloc, legroom
kept = []
for number in range(160):
    if number == 40:
        assert not tracemalloc.is_tracing()
        tracemalloc.start(3)
    kept.append(bytearray(30_000))
    legroom.step()
    time.sleep(0.003)
    if number > 40:
        assert tracemalloc.is_tracing() and tracemalloc.get_traceback_limit() == 3
assert tracemalloc.get_traced_memory()[0] > 100 * 30_000
assert any("train.py" in str(one.traceback) for one in tracemalloc.take_snapshot().statistics("lineno")[:3])
tracemalloc.stop()
assert not tracemalloc.is_tracing()
print("kept")
"""

COPIES = """
import time, torch
from torch.utils.data import DataLoader, Dataset
class Annotated(Dataset):
    def __init__(self):
        self.paths = ["images/%08d.jpg" % number for number in range(5000)]
        self.annotations = [{"id": number, "box": [number, 2.5, "label %d" % number]} for number in range(90_000)]
    def __len__(self):
        return 200
    def __getitem__(self, index):
        return sum(len(one["box"]) for one in self.annotations[index * 450 : index * 450 + 450])
if __name__ == "__main__":
    for batch in DataLoader(Annotated(), batch_size=2, num_workers=1, multiprocessing_context="fork"):
        time.sleep(0.02)
    time.sleep(0.5)
"""


def leak(folder: Path, script: str, *launcher: str, status: int = 0, **environment: str) -> dict[str, Any]:
    (folder / "train.py").write_text(script)
    done = subprocess.run(
        [sys.executable, "-m", "legroom", "leak", "--quiet", "--json", "--", sys.executable, *launcher, "train.py"],
        cwd=folder, env={**os.environ, "OMP_NUM_THREADS": "1", **environment}, capture_output=True, text=True,
        timeout=240, check=False,
    )  # fmt: skip
    assert done.returncode == status, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    assert found["exit"] == status
    return {**found, "stderr": done.stderr}


def _line(script: str, part: str) -> int:
    return next(number for number, text in enumerate(script.split("\n"), 1) if part in text)


@few_samples
def test_two_ranks_of_torchrun_are_one_line_of_the_report(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = leak(tmp_path, TRAIN, "-m", "torch.distributed.run", "--nproc-per-node", "2")
    (site,) = found["sites"]
    assert site["file"] == str(tmp_path / "train.py") and site["line"] == _line(TRAIN, "history.append")
    assert len(site["pids"]) == 2 and site["kind"] == "tensors" and site["holder"] == "history"
    assert {one["rank"] for one in found["processes"] if one["sites"]} == {"0", "1"}


@pytest.mark.soak
@few_samples
def test_under_accelerate(tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    found = leak(tmp_path, TRAIN, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1")
    (site,) = found["sites"]
    assert site["line"] == _line(TRAIN, "history.append") and site["per"] == "step"
    assert 30_000 < site["rate"] < 36_000


@few_samples
@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_samples_that_a_worker_keeps(method: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    script = WORKERS.replace("METHOD", method)
    found = leak(tmp_path, script)
    (site,) = found["sites"]
    assert site["line"] == _line(script, "self.seen.append") and site["holder"] == "dataset.seen"
    assert [one["role"] for one in found["processes"] if one["sites"]] == ["worker"]
    assert 28_000 < site["rate"] < 40_000  # four samples a batch


@few_samples
def test_a_script_that_forks(tmp_path: Path) -> None:
    found = leak(tmp_path, FORKS)
    (site,) = found["sites"]
    assert site["line"] == _line(FORKS, "kept.append") and site["kind"] == "python"
    assert [one["role"] for one in found["processes"] if one["sites"]] == ["forked"]


@few_samples
def test_a_script_that_uses_tracemalloc_keeps_it(tmp_path: Path) -> None:
    found = leak(tmp_path, TRACES)
    assert found["stderr"].strip() == "kept"  # the script's stdout
    # The tables of the script's own tracemalloc grow too, outside Python.
    (site,) = [one for one in found["sites"] if one["line"]]
    assert site["line"] == _line(TRACES, "kept.append")


@few_samples
def test_a_dataset_that_workers_copy_is_named_by_its_attribute(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    found = leak(tmp_path, COPIES)
    (site,) = found["sites"]
    assert site["kind"] == "copy-on-write" and site["holder"] == "dataset.annotations"
    assert site["growth"] > 8 << 20


@few_samples
def test_the_command_s_status_and_a_script_that_is_killed(tmp_path: Path) -> None:
    script = FORKS.replace("os.waitpid(child, 0)", "os.waitpid(child, 0); os.kill(os.getpid(), 9)")
    found = leak(tmp_path, script, status=137)
    assert [site["line"] for site in found["sites"]] == [_line(script, "kept.append")]


def test_ctrl_c_ends_the_script_as_without_legroom(tmp_path: Path) -> None:
    """Also before the first sample: what is imported at exit must not change how Python ends after KeyboardInterrupt."""
    leak(tmp_path, "import os, signal\nos.kill(os.getpid(), signal.SIGINT)\ninput()\n", status=130)


def test_an_environment_without_space_for_records_does_not_disturb_the_script(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import legroom.leak.memory_recorder as i; r = i.record_process('/nonexistent/x'); r.start();"
         "import legroom\nfor n in range(50): legroom.step()\nr.stop(); print('fine')"],
        capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert done.stdout == "fine\n" and done.stderr == ""
