"""In a memory cgroup of 1 GB: what was asked for is killed, what tune chose runs; both really run."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import rigs

MB, GB = 1 << 20, 1 << 30

# 24 MB a batch. Eight workers × four batches ahead are 34 in flight: 816 MB beside what torch itself takes.
SCRIPT = """
import json, multiprocessing, sys, time
import torch
from torch.utils.data import DataLoader
import legroom

class Frames(torch.utils.data.Dataset):
    def __len__(self): return 16 * 60
    def __getitem__(self, index): return torch.full((3, 256, 512), float(index))

def used(pid):
    try:
        fields = open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()
    except OSError:
        return "R", 0
    return fields[0], int(fields[11]) + int(fields[12])

def fill_queues():
    # Until no worker runs or waits for a core, and all together have used a fiftieth of one in half a second.
    until, before = time.monotonic() + 120, None
    while time.monotonic() < until:
        states, ticks = zip(*[used(child.pid) for child in multiprocessing.active_children()] or [("S", 0)])
        if before is not None and not set(states) & set("RD") and sum(ticks) - before <= 1:
            return
        before = sum(ticks)
        time.sleep(0.5)

def main(asked):
    frames = Frames()
    if asked:
        settings, kind = dict(batch_size=16, num_workers=8, prefetch_factor=4), DataLoader
    else:
        chosen = legroom.tune(frames, batch_size=16, effective_batch=32, step_seconds=0.02, loader=LOADER)
        assert chosen.effective_batch == 32
        settings, kind = chosen.loader(), DataLoader if LOADER == "torch" else legroom.DataLoader
    torch.set_num_threads(1)
    seen = 0
    for batch in kind(frames, **settings):
        if not seen:
            fill_queues()
        seen += len(batch)
    print(json.dumps({"seen": seen, "settings": settings}))

if __name__ == "__main__":
    main(sys.argv[1] == "asked")
"""


def _run(folder: Path, group: rigs.Cgroup, how: str, loader: str = "torch") -> subprocess.CompletedProcess[str]:
    script = folder / "train.py"
    script.write_text(f"LOADER = {loader!r}\n" + SCRIPT)
    # Warnings of torch about more workers than cores are not what is tested.
    line = [sys.executable, "-W", "ignore", str(script), how]
    # A /dev/shm of its own: what torch's loader leaves there when it is killed goes with it.
    command = group.command(rigs.small_shm(line, "2g"))
    return subprocess.run(command, capture_output=True, text=True, timeout=200)


@pytest.mark.real("cgroup", "mount")
def test_what_was_asked_for_is_killed_in_one_gigabyte(tmp_path: Path) -> None:
    with rigs.memory_cgroup(GB) as group:
        done = _run(tmp_path, group, "asked")
        assert done.returncode != 0 and group.oom_kills() > 0, done.stderr[-2000:]


@pytest.mark.real("cgroup", "mount")
@pytest.mark.parametrize("loader", ["torch", "legroom"])
def test_what_tune_chose_runs_within_it(tmp_path: Path, loader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    with rigs.memory_cgroup(GB) as group:
        done = _run(tmp_path, group, "tuned", loader)
        assert done.returncode == 0 and group.oom_kills() == 0, done.stderr[-2000:]
        told = json.loads(done.stdout.splitlines()[-1])
    assert told["seen"] == 16 * 60
    settings = told["settings"]
    assert settings["num_workers"] * settings.get("prefetch_factor", 0) < 8 * 4


@pytest.mark.real("cgroup")
def test_a_dataset_that_is_oom_killed_is_recognised(tmp_path: Path) -> None:
    (tmp_path / "eating.py").write_text(
        "class Eating:\n"
        "    def __len__(self): return 4\n"
        "    def __getitem__(self, index):\n"
        "        self.kept = [b'x' * (64 << 20) for _ in range(64)]\n"
    )
    request = (
        "import os, sys; os.chdir(sys.argv[1])\n"
        "from legroom.loader.measure.measure_in_child import measure_dataset\n"
        "measure_dataset('eating:Eating', batch_size=2)\n"
    )
    with rigs.memory_cgroup(GB) as group:
        done = subprocess.run(
            group.command([sys.executable, "-c", request, str(tmp_path)]), capture_output=True, text=True, timeout=240
        )
    assert (
        done.returncode == 1
        and "DatasetOutOfMemory" in done.stderr
        and ("killed it for memory" in done.stderr or "almost none was free" in done.stderr)
    ), done.stderr


@pytest.mark.real("mount")
def test_measuring_does_not_itself_burst_a_small_shm(tmp_path: Path) -> None:
    """Batches of 24 MB in a /dev/shm of 64 MB: no worker can be tried there, and none is chosen for torch's loader."""
    script = (
        "import torch, legroom\n"
        "class Frames:\n"
        "    def __len__(self): return 960\n"
        "    def __getitem__(self, index): return torch.zeros(3, 256, 512)\n"
        "def chosen(loader): return legroom.tune(Frames(), batch_size=16, step_seconds=0.01, loader=loader)\n"
        "torchs, ours = chosen('torch'), chosen('legroom')\n"
        "print(torchs.num_workers, torchs.measured.transport, ours.measured.transport is not None)\n"
    )
    done = subprocess.run(
        rigs.small_shm([sys.executable, "-W", "ignore", "-c", script]), capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["0", "None", "True"]
