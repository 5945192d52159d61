"""Running jobs measured: what each holds for itself, and what they share counted once."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from legroom.errors import NoSuchProcess, NothingMatches
from legroom.loader.legroom_plan import plan
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory_of_running_jobs import measure_running_jobs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="/dev/shm is Linux's")
MB = 1 << 20
HOLD = """
import os, sys, time
common = os.open(sys.argv[1], os.O_RDWR)
own = os.open(sys.argv[1] + str(os.getpid()), os.O_RDWR | os.O_CREAT)
os.unlink(sys.argv[1] + str(os.getpid()))
os.posix_fallocate(own, 0, 2 << 20)
print("ready", flush=True)
time.sleep(600)
"""


@pytest.fixture
def pair() -> Iterator[list[int]]:
    """Two processes with 2 MB each of their own and 8 MB in common."""
    common = Path(f"/dev/shm/shared-test-{os.getpid()}")
    yield from _held(common)


@pytest.fixture
def stored() -> Iterator[list[int]]:
    """The same, with the 8 MB in a store of shared datasets."""
    store = Path(f"/dev/shm/legroom-test-{os.getpid()}")
    store.mkdir()
    try:
        yield from _held(store / "images.npy")
    finally:
        store.rmdir()


def _held(common: Path) -> Iterator[list[int]]:
    with common.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, 8 * MB)
    children = []
    try:
        for _ in range(2):
            children.append(subprocess.Popen([sys.executable, "-c", HOLD, str(common)], stdout=subprocess.PIPE))
        for child in children:
            assert child.stdout is not None and child.stdout.readline() == b"ready\n"
        yield [child.pid for child in children]
    finally:
        for child in children:
            child.kill()
            child.communicate()
        common.unlink()


def test_what_they_share_counts_once(pair: list[int]) -> None:
    found = measure_running_jobs(Host(), pair)
    assert found.shm == (2 * MB, 2 * MB) and found.shared == 8 * MB and found.held == 12 * MB
    assert found.each_shm == 2 * MB and (found.each_ram or 0) > MB
    planned = plan(gpus=4, jobs_per_gpu=3, measure=pair)
    assert planned.need.shm == 12 * 2 * MB + 8 * MB
    assert planned.machine is not None and planned.others == (planned.machine.shm.used or 0) - 12 * MB


def test_a_shared_dataset_counts_once_even_for_a_single_training_run(stored: list[int]) -> None:
    found = measure_running_jobs(Host(), stored[:1])
    assert found.shm == (2 * MB,) and found.shared == 8 * MB
    assert plan(gpus=4, jobs_per_gpu=3, measure=stored[:1]).need.shm == 12 * 2 * MB + 8 * MB


def test_no_process_and_no_job() -> None:
    with pytest.raises(NoSuchProcess):
        measure_running_jobs(Host(), [999_999_999])
    with pytest.raises(NothingMatches):
        measure_running_jobs(Host(), pattern="no such training as this [0-9]{9}")


@pytest.mark.real("user")
def test_another_users_process_cannot_be_measured(pair: list[int]) -> None:
    import rigs

    code = f"import sys; from legroom.cli.main import run; sys.exit(run(['plan', '--measure', '{pair[0]}']))"
    done = subprocess.run(rigs.as_user(65534, [sys.executable, "-c", code]), capture_output=True, text=True, cwd="/")
    assert done.returncode == 2 and "[unreadable-process]" in done.stderr, done.stderr
    assert f"the memory of process {pair[0]} may not be read" in done.stderr
    assert "uid 0 runs it, and this command runs as uid 65534" in done.stderr and "no permission" in done.stderr
    assert "ram:" not in done.stderr and "as root" in done.stderr
