"""Frozen objects of the sizes that people have: 5 GB, ten million strings, kills and two writers meanwhile."""

from __future__ import annotations

import gc
import os
import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import legroom
from legroom.cache import drop_and_gc, list_and_verify

pytestmark = pytest.mark.soak
GB = 1 << 30


@pytest.fixture
def shm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store in /dev/shm of its own, empty again at the end."""
    root = Path(f"/dev/shm/legroom-soak-freeze-{os.getpid()}")
    for folder, variable in ((root, "LEGROOM_SHM"), (tmp_path / "disk", "LEGROOM_DIR")):
        folder.mkdir(mode=0o700)
        monkeypatch.setenv(variable, str(folder))
    try:
        yield root / f"legroom-{os.geteuid()}"
        gc.collect()
        drop_and_gc.drop(force=True)
        drop_and_gc.gc()
        files = [path for path in root.rglob("*") if path.is_file() and path.stat().st_size > 4096]
        assert not files and not list_and_verify.entries()
    finally:
        for path in sorted(root.rglob("*"), reverse=True):
            path.rmdir() if path.is_dir() else path.unlink()
        root.rmdir()


def _needs(free: int) -> None:
    found = legroom.available().bytes
    if found is None or found < free:
        pytest.skip(f"needs {free / GB:.0f} GB of RAM")


def test_five_gigabytes_of_bytes(shm: Path) -> None:
    """Positions beyond 4 GB; one object many times, so that only the shared copy is large."""
    _needs(7 * GB)
    blobs = [os.urandom(1 << 20) for _ in range(3)]
    items = [blobs[number % 3] for number in range(5 * 1024)]
    view = legroom.freeze(items, name="blobs")
    assert view.info.bytes > 5 * GB and len(view) == len(items)
    for index in (0, 1, 4095, 4096, 4097, 5 * 1024 - 1, -1, -1025):
        assert view[index] == items[index]
    (found,) = list_and_verify.verify("blobs")
    assert found.whole


def test_five_gigabytes_of_python_objects(shm: Path) -> None:
    _needs(11 * GB)
    chance = random.Random(3)
    items: list[Any] = []
    gc.disable()
    try:
        while len(items) < 560_000:  # about 9.5 kB each as Python objects
            number = len(items)
            boxes = [[chance.random() for _ in range(20)] for _ in range(11)]
            items.append({"id": number, "name": f"{number:012d}.jpg", "boxes": boxes, "labels": (number % 7, None)})
        grown = int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        assert grown > 5 * GB
        view = legroom.freeze(items)
        for index in (0, 1, 279_999, 559_998, -1):
            assert view[index] == items[index]
        assert all(view[index] == items[index] for index in range(0, len(items), 97))
    finally:
        gc.enable()


def test_ten_million_strings_and_as_many_keys(shm: Path) -> None:
    _needs(6 * GB)
    names = [f"train/{number % 1000:04d}/{number:09d}.jpg" for number in range(10_000_000)]
    view = legroom.freeze(names)
    assert len(view) == 10_000_000 and view[-1] == names[-1] and view[5_000_000:][17] == names[5_000_017]
    assert all(view[index] == names[index] for index in range(0, 10_000_000, 9973))
    table = dict(zip(names, range(10_000_000), strict=True))
    frozen = legroom.freeze(table)
    assert all(frozen[name] == table[name] for name in names[::9973]) and "missing" not in frozen
    assert len(frozen) == 10_000_000 and next(iter(frozen)) == names[0]


def test_killed_and_raced_while_it_freezes_much(shm: Path) -> None:
    """A writer of 400 MB is killed at random moments while a second process wants the same."""
    _needs(3 * GB)
    blob = os.urandom(1 << 16)
    items, chance = [[blob, number] for number in range(6400)], random.Random(11)
    for _ in range(12):
        pids = []
        for _ in range(2):
            pid = os.fork()
            if pid == 0:
                view = legroom.freeze(items)
                os._exit(0 if view[-1] == items[-1] and len(view) == len(items) else 1)
            pids.append(pid)
        time.sleep(chance.random() * 0.8)
        os.kill(pids[0], signal.SIGKILL)
        os.waitpid(pids[0], 0)
        assert os.waitstatus_to_exitcode(os.waitpid(pids[1], 0)[1]) == 0
        drop_and_gc.drop(force=True)
    drop_and_gc.gc()
    assert not [name for name in os.listdir(shm / "work") if name != "used"]
