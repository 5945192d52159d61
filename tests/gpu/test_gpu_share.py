"""A group of trainers on one GPU: every batch is right, private, and copied from the host once for all."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("no CUDA device", allow_module_level=True)

import share_data  # noqa: E402  needs torch
import share_trainer  # noqa: E402

from legroom.loader.dataloader.sharing.group_folder import groups  # noqa: E402

pytestmark = pytest.mark.gpu
SCRIPT = Path(__file__).parent / "scripts" / "share_trainer.py"
SOURCE = Path(__file__).parents[2] / "src"


class Group:
    """Trainers in processes of their own, in a store of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.started: list[subprocess.Popen[bytes]] = []

    def start(self, epochs: int, pause: float = 0.0, how: str = "cuda") -> int:
        number = len(self.started)
        command = [
            sys.executable,
            os.fspath(SCRIPT),
            os.fspath(self.folder / str(number)),
            str(epochs),
            str(pause),
            how,
        ]
        env = {**os.environ, "PYTHONPATH": os.fspath(SOURCE)}
        self.started.append(subprocess.Popen(command, env=env))
        return number

    def lines(self, number: int) -> list[str]:
        path = self.folder / str(number)
        return path.read_text().splitlines() if path.exists() else []

    def reference(self, epochs: int) -> list[str]:
        return share_data.reference(share_trainer.loader(), epochs)

    def wait_for(self, condition: Callable[[], bool]) -> None:
        until = time.monotonic() + 90
        while not condition():
            assert time.monotonic() < until, [len(self.lines(number)) for number in range(len(self.started))]
            time.sleep(0.02)

    def go(self, trainers: list[int]) -> None:
        """Let the trainers continue after their first batch, when a producer has made some."""
        self.wait_for(lambda: all(self.lines(number) for number in trainers))
        self.wait_for(lambda: any(one["batches"] for one in groups()))
        (self.folder / "go").touch()

    def ended(self, number: int) -> list[str]:
        """The lines of a trainer that has ended by itself, without the last one."""
        assert self.started[number].wait(300) == 0
        *lines, last = self.lines(number)
        assert last.startswith("end "), last
        return lines


@pytest.fixture
def group(monkeypatch: pytest.MonkeyPatch) -> Iterator[Group]:
    folder = Path(tempfile.mkdtemp(prefix="legroom-gpu-test-", dir="/dev/shm"))
    monkeypatch.setenv("LEGROOM_SHM", os.fspath(folder))
    before = used()
    made = Group(folder)
    yield made
    for one in made.started:
        one.kill()
        one.wait()
    made.wait_for(lambda: not [one for one in groups() if one["producer"]])
    made.wait_for(lambda: used() <= before + (64 << 20))  # the driver frees it after a process has gone
    left = [path.name for path in folder.glob("legroom-*/share/*") if path.suffix != ".log"]
    shutil.rmtree(folder)
    assert not left


def used() -> int:
    free, total = torch.cuda.mem_get_info()
    return int(total - free)


def status() -> dict[str, Any]:
    return next((one for one in groups() if one["producer"]), {"gpus": [], "producer": 0})


def copied() -> int:
    return sum(one["copied"] for one in status()["gpus"])


def test_batches_are_right_private_and_copied_once(group: Group) -> None:
    expected = group.reference(5)
    trainers = [group.start(5, 0.01) for _ in range(3)]
    group.go(trainers)
    group.wait_for(lambda: copied() > 60)
    (gpu,) = status()["gpus"]
    assert gpu["trainers"] == 3 and gpu["read"] > 1.8 * gpu["copied"], gpu
    print(gpu)
    for number in trainers:
        assert group.ended(number) == expected
        assert "once for all trainers" in group.lines(number)[-1]


def test_kills_of_a_trainer_that_copies_and_of_the_producer(group: Group) -> None:
    expected = group.reference(6)
    trainers = [group.start(6, 0.01) for _ in range(4)]
    group.go(trainers)
    group.wait_for(lambda: copied() > 10)
    for number in trainers[:2]:
        here = copied()
        group.started[number].send_signal(signal.SIGKILL)
        group.wait_for(lambda here=here: copied() > here + 5)
    os.kill(status()["producer"], signal.SIGKILL)
    here = len(group.lines(trainers[2]))
    group.wait_for(lambda: len(group.lines(trainers[2])) > here + 5)
    for number in trainers[2:]:
        assert group.ended(number) == expected
    for number in trainers[:2]:
        assert group.lines(number) == expected[: len(group.lines(number))]


def test_pinned_batches_of_a_group(group: Group) -> None:
    expected = group.reference(2)
    trainers = [group.start(2, 0.01, "pin") for _ in range(2)]
    group.go(trainers)
    for number in trainers:
        assert group.ended(number) == expected
