"""Damaged files of every format: an error that says so, or the right data; never anything else.

The files are read in a process of their own. One that dies is a failure here, not the end of pytest. "Right"
is what the reference library reads from the same damaged file, or what was in it before: damage that no
format notices (a changed pixel) changes the data for everybody alike.
"""

from __future__ import annotations

import json
import select
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fuzz_samples import TINY
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

CHILD = Path(__file__).with_name("fuzz_child.py")
PATIENCE = 240.0  # it also imports what reads the formats


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


@pytest.fixture(scope="module")
def children() -> Iterator[dict[str, Child]]:
    made = {mode: Child(mode) for mode in ("ours", "reference")}
    yield made
    for child in made.values():
        child.close()


place = st.integers(0, 1 << 32)  # modulo the length: small numbers would all be at the beginning
damage = st.one_of(
    st.lists(st.tuples(place, st.integers(0, 255)), min_size=1, max_size=6),
    place,  # cut there
)


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


@pytest.mark.skipif(sys.platform == "win32", reason="select needs pipes that Windows does not have")
@pytest.mark.parametrize("sample", TINY, ids=str)
def test_a_damaged_file_is_an_error_or_right(sample: Any, children: dict[str, Child], tmp_path: Path) -> None:
    good = sample.write(tmp_path)
    before = children["ours"].ask(sample.name, tmp_path / "x")
    assert before["kind"] == "data", before
    assert before == children["reference"].ask(sample.name, tmp_path / "x")

    @settings(max_examples=120, deadline=None, derandomize=True, database=None, suppress_health_check=list(HealthCheck))
    @given(how=damage)
    def check(how: Any) -> None:
        path = tmp_path / "damaged"
        write_damaged(good, path, how)
        answer = children["ours"].ask(sample.name, path)
        assert answer["kind"] in ("error", "data", "huge"), answer
        if answer["kind"] != "data":
            return
        reference = children["reference"].ask(sample.name, path)
        if reference["kind"] != "data":
            return  # nobody to compare with: it refused, or died of it
        for name, digest in answer["found"].items():
            assert digest in (reference["found"].get(name), before["found"].get(name)), name

    check()
