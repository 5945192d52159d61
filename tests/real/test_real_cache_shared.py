"""Many processes, one copy: who reads, what each costs, and that writes stay private."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import legroom
from legroom.cache import drop_and_gc, list_and_verify

SINGLE = Path(__file__).parents[1] / "unit" / "cache" / "cache_open_process.py"


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A store in real shared memory, of the test's own."""
    if not os.path.ismount("/dev/shm"):
        pytest.skip("needs /dev/shm")
    folder = Path(tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm"))
    monkeypatch.setenv("LEGROOM_SHM", str(folder))
    monkeypatch.setenv("LEGROOM_DIR", str(tmp_path))
    yield folder
    shutil.rmtree(folder)


def wait_for_files(folder: Path, pattern: str, count: int, processes: list[subprocess.Popen[bytes]]) -> None:
    deadline = time.monotonic() + 240
    while len(list(folder.glob(pattern))) < count:
        assert time.monotonic() < deadline
        assert all(process.poll() in (None, 0) for process in processes)
        time.sleep(0.01)


@pytest.mark.real()
@pytest.mark.parametrize("count", [16, pytest.param(48, marks=pytest.mark.soak)])
def test_many_processes_read_a_cold_file_once_and_share_it(memory: Path, tmp_path: Path, count: int) -> None:
    path, folder = tmp_path / "big.npy", tmp_path / "stage"
    folder.mkdir()
    big = np.random.default_rng(2).integers(0, 255, (64 << 20,), np.uint8)
    np.save(path, big)
    command = [sys.executable, str(SINGLE), str(path), str(folder)]
    processes = [subprocess.Popen([*command, str(number)]) for number in range(count)]
    try:
        wait_for_files(folder, "started-*", count, processes)
        time.sleep(2.1)
        (folder / "open").touch()
        wait_for_files(folder, "opened-*", count, processes)
        (folder / "measure").touch()
        wait_for_files(folder, "measured-*", count, processes)
        (entry,) = list_and_verify.entries(with_users=True)
        with pytest.raises(legroom.LegroomError, match="in use"):
            drop_and_gc.drop(path)
    finally:
        (folder / "end").touch()
        codes = [process.wait(60) for process in processes]
    assert codes == [0] * count
    assert entry.in_use and entry.users is not None and len(entry.users) == count
    results = [json.loads((folder / f"measured-{number}").read_text()) for number in range(count)]
    assert {one["crc"] for one in results} == {zlib.crc32(big, zlib.crc32(b"array"))}
    steps = [line.split() for line in (folder / "log").read_text().splitlines()]
    readers = [pid for pid, name in steps if name == "read"]
    assert len(readers) == 1  # one process loads, hashing on the way
    assert not [pid for pid, name in steps if name == "hash"]  # and nobody hashes once more
    assert sum(one["pss"] for one in results) <= 1.02 * entry.bytes
    assert all(one["written"] == 0 for one in results)
    assert max(one["grown"] for one in results if str(one["pid"]) != readers[0]) <= 1 << 20
    drop_and_gc.drop(path)


@pytest.mark.real()
def test_writes_are_private_and_shown(memory: Path, tmp_path: Path) -> None:
    path = tmp_path / "a.npy"
    np.save(path, np.zeros((4 << 20,), np.uint8))
    mine, theirs = legroom.open(path), legroom.open(path)
    mine["array"][: 1 << 20] = 1
    assert not theirs["array"].any()
    assert not legroom.open(path)["array"].any()
    (check,) = list_and_verify.verify(path)
    assert check.whole and check.source == "same"
    (user,) = list_and_verify.info(path).users or ()
    assert user.pid == os.getpid()
    assert user.privatised == (1 << 20) + 4096  # the header shifts the data by part of a page
