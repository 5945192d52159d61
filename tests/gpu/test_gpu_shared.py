"""One copy in GPU memory: processes share it, survive the one that made it, and leave nothing behind."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "scripts" / "shared_process.py"
STORM = Path(__file__).parent / "scripts" / "shared_storm.py"
SOURCE = Path(__file__).parents[2] / "src"
KILLS = int(os.environ.get("LEGROOM_GPU_KILLS", "200"))
BYTES = 2 << 30


@pytest.fixture
def stores() -> Iterator[dict[str, str]]:
    folders = [Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir=where)) for where in ("/dev/shm", "/var/tmp")]
    yield {"LEGROOM_SHM": os.fspath(folders[0]), "LEGROOM_DIR": os.fspath(folders[1])}
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def sources() -> Iterator[dict[str, Path]]:
    folder = Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir="/var/tmp"))
    made = np.random.default_rng(3)
    rows = made.integers(0, 255, (BYTES >> 16, 1 << 16), np.uint8)
    np.savez(folder / "data.npz", rows=rows, labels=np.arange(len(rows)))
    torch.save(
        {f"layer.{n}": torch.randn(4096, 4096).bfloat16() for n in range(8)} | {"bias": torch.randn(77)},
        folder / "model.pt",
    )
    yield {"data": folder / "data.npz", "weights": folder / "model.pt"}
    shutil.rmtree(folder)


class Process:
    """One that shares; ``answer`` waits until it has checked every byte."""

    def __init__(self, stores: dict[str, str], kind: str, path: Path) -> None:
        env = {**os.environ, **stores, "PYTHONPATH": os.fspath(SOURCE)}
        command = [sys.executable, os.fspath(SCRIPT), kind, os.fspath(path)]
        self.started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env)

    def answer(self) -> dict[str, Any]:
        assert self.started.stdout is not None
        found: dict[str, Any] = json.loads(self.started.stdout.readline())
        assert found["right"], found
        return found

    def kill(self) -> str:
        self.started.send_signal(signal.SIGKILL)
        return self.started.communicate()[0]


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def settles(limit: int) -> bool:
    """Whether GPU memory in use comes back to so much; the driver frees it after a process has gone."""
    end = time.monotonic() + 20
    while used() > limit and time.monotonic() < end:
        time.sleep(0.1)
    return used() <= limit


@pytest.mark.parametrize("kind", ["data", "weights"])
def test_processes_share_one_copy_that_survives_its_maker(
    stores: dict[str, str], sources: dict[str, Path], kind: str
) -> None:
    before = used()
    first = Process(stores, kind, sources[kind])
    assert "here for all processes" in first.answer()["why"]
    one = used() - before
    second = Process(stores, kind, sources[kind])
    assert "shared with other processes" in second.answer()["why"]
    context = used() - before - one
    assert context < (800 << 20) < one
    first.kill()
    third = Process(stores, kind, sources[kind])
    assert "shared with other processes" in third.answer()["why"]
    assert used() - before < one + 2 * context
    second.kill()
    third.kill()
    assert settles(before + (64 << 20))


def test_random_kills(stores: dict[str, str], sources: dict[str, Path]) -> None:
    """Makers and holders are killed at random times: no wrong byte, and nothing left on the GPU."""
    before = used()
    legroom_cache = {**os.environ, **stores, "PYTHONPATH": os.fspath(SOURCE)}
    load = [sys.executable, "-m", "legroom", "cache", "load", os.fspath(sources["weights"])]
    subprocess.run(load, env=legroom_cache, check=True, capture_output=True)
    command = [sys.executable, os.fspath(STORM), os.fspath(sources["weights"]), str(KILLS), "11"]
    done = subprocess.run(command, env=legroom_cache, capture_output=True, text=True, timeout=60 + 2 * KILLS)
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout)
    print(found, done.stderr.splitlines()[-1])
    assert found["wrong"] == [] and found["silent"] == 0 and set(found["answers"]) == {"made", "got"}, found
    assert found["answers"]["made"] > 1 and found["answers"]["got"] > KILLS / 8, found
    assert min(found["killed"].values()) > KILLS / 16, found
    assert settles(before + (64 << 20))
    last = Process(stores, "weights", sources["weights"])
    assert "here for all processes" in last.answer()["why"]
    last.started.communicate("")  # it ends by itself
    left = [path for where in stores.values() for path in Path(where).glob("legroom-*/gpu/*")]
    assert left == []
