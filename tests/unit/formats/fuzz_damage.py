"""Damages files of every format and has them read, in a process of its own: one that dies is a failure, not the end of pytest.

"Right" is what the reference library reads from the same damaged file, or what was in it before: damage that no format
notices (a changed pixel) changes the data for everybody alike.
"""

from __future__ import annotations

import json
import random
import select
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

CHILD = Path(__file__).with_name("fuzz_child.py")
PATIENCE = 240.0  # it also imports what reads the formats
# What reading a damaged file may take beyond a good one. The HDF5 library takes as much as a damaged length of a text in an
# attribute says, up to 4 GiB, before it compares it with what the file holds (docs/security.md).
MOST_MEMORY, MOST_MEMORY_OF_HDF5 = 256 << 20, (4 << 30) + (256 << 20)


class Child:
    """A reader of files in another process, started anew when it dies."""

    def __init__(self, mode: str) -> None:
        self._mode = mode
        self._process: subprocess.Popen[str] | None = None

    def ask(self, sample: str, path: Path) -> dict[str, Any]:
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, CHILD, self._mode],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            )  # fmt: skip
        process = self._process
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(f"{sample}\t{path}\n")
        process.stdin.flush()
        ready, _, _ = select.select([process.stdout], [], [], PATIENCE)
        line = process.stdout.readline() if ready else ""
        if not line:
            self.close(kill=not ready)
            return {"kind": "hang" if not ready else "crash", "status": process.returncode}
        answer: dict[str, Any] = json.loads(line)
        return answer

    def close(self, kill: bool = False) -> None:
        process, self._process = self._process, None
        if process is not None:
            if kill:
                process.kill()
            process.communicate()


def damaged(data: bytes, how: Any) -> bytes:
    if isinstance(how, int):
        return data[: how % len(data)]
    changed = bytearray(data)
    for at, value in how:
        changed[at % len(data)] = value
    return bytes(changed)


def write_damaged(good: Path, path: Path, how: Any) -> None:
    """Damage a file, or one file of a directory."""
    if good.is_file():
        path.write_bytes(damaged(good.read_bytes(), how))
        return
    if path.exists():
        shutil.rmtree(path)
    shutil.copytree(good, path)
    files = sorted(file for file in path.rglob("*") if file.is_file() and file.stat().st_size)
    chosen = files[(how if isinstance(how, int) else how[0][0]) % len(files)]
    chosen.write_bytes(damaged(chosen.read_bytes(), how))


def random_damage(chance: random.Random) -> Any:
    """One to six changed bytes, or, once in five times, a cut."""
    if chance.random() < 0.2:
        return chance.randrange(1 << 32)
    return [(chance.randrange(1 << 32), chance.randrange(256)) for _ in range(chance.randrange(1, 7))]


class Damages:
    """One sample as it was written, and what must come of each damage to it: an error in words, or the right data."""

    def __init__(self, sample: Any, folder: Path, children: dict[str, Child]) -> None:
        self._sample, self._folder, self._children = sample, folder, children
        self._good = sample.write(folder)
        self._before = children["ours"].ask(sample.name, folder / "x")
        assert self._before["kind"] == "data", self._before
        assert self._found(self._before) == self._found(children["reference"].ask(sample.name, folder / "x"))
        most = MOST_MEMORY_OF_HDF5 if sample.name.startswith("hdf5") else MOST_MEMORY
        self._most: int = self._before["peak"] + most

    def check(self, how: Any) -> str:
        """Damage it so, and return what came of it: error, data, or huge."""
        path = self._folder / "damaged"  # some formats need a second file beside it
        write_damaged(self._good, path, how)
        answer = self._children["ours"].ask(self._sample.name, path)
        told = (self._sample.name, how, answer)
        assert answer["kind"] in ("error", "data", "huge"), told
        # The peak of a process counts all files that it has read; every sample is a few kB.
        assert answer["peak"] <= self._most, told
        if answer["kind"] == "data":
            reference = self._children["reference"].ask(self._sample.name, path)
            if reference["kind"] == "data":  # else nobody to compare with: it refused, or died of it
                for name, digest in answer["found"].items():
                    assert digest in (reference["found"].get(name), self._before["found"].get(name)), (name, told)
        return str(answer["kind"])

    @staticmethod
    def _found(answer: dict[str, Any]) -> Any:
        return {name: value for name, value in answer.items() if name != "peak"}
