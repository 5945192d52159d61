"""Runs the scenarios of cache_scenarios.py in one prepared process, stores of its own in shared memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zlib
from pathlib import Path
from typing import Any

import h5py
import numpy as np

# What `legroom.cache.store_directories.step` names, in the order of a cold start and of a removal.
BUILD_STEPS = (
    "elected", "work", "reserve", "read", "allocate", "write", "written", "seal", "lease", "manifest",
    "publish", "record", "recorded", "done",
)  # fmt: skip
REMOVAL_STEPS = ("hold", "trash", "delete", "unlock", "removed")

SCENARIOS = Path(__file__).with_name("cache_scenarios.py")


class ScenarioProcess:
    """A prepared process that plays scenes, with stores of its own in shared memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.memory = Path(tempfile.mkdtemp(prefix="legroom-test-", dir="/dev/shm"))
        self.work = folder / "work"
        self.work.mkdir()
        (folder / "disk").mkdir()
        env = {**os.environ, "LEGROOM_SHM": str(self.memory), "LEGROOM_DIR": str(folder / "disk")}
        self.process = subprocess.Popen(
            [sys.executable, str(SCENARIOS)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
        )

    def play(self, scene: str, **arguments: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(json.dumps([scene, {**arguments, "work": str(self.work)}]) + "\n")
        self.process.stdin.flush()
        result: dict[str, Any] = json.loads(self.process.stdout.readline())
        assert "error" not in result, result.get("trace", result)
        return result

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(120)
        shutil.rmtree(self.memory)


def small_file(folder: Path) -> tuple[Path, int]:
    """A small HDF5 file with a raw and a compressed array, quiet for two seconds, and its checksum."""
    path = folder / "small.h5"
    rng = np.random.default_rng(1)
    arrays = {"images": rng.integers(0, 255, (64, 32, 32, 3), np.uint8), "zipped": rng.random((64, 100), np.float32)}
    with h5py.File(path, "w") as file:
        file["images"] = arrays["images"]
        file.create_dataset("zipped", data=arrays["zipped"], chunks=(16, 100), compression="gzip")
    time.sleep(2.1)
    return path, crc_of(arrays)


def crc_of(arrays: dict[str, Any]) -> int:
    total = 0
    for name in sorted(arrays):
        total = zlib.crc32(np.ascontiguousarray(arrays[name]).view(np.uint8), zlib.crc32(name.encode(), total))
    return total
