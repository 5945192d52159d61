"""A training killed at any step and resumed ends with the weights of an uninterrupted one, bit by bit."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pa = pytest.importorskip("pyarrow")
pytest.importorskip("torch")
import numpy as np  # noqa: E402
import pyarrow.parquet as pq  # noqa: E402

SCRIPT = Path(__file__).with_name("resume_train.py")
KINDS = ("stream", "batches", "loader")
STEPS = 10  # 5 an epoch
pytestmark = [pytest.mark.real(), pytest.mark.skipif(not hasattr(os, "fork"), reason="trainings are forked")]


class Trainings:
    """A server that forks training runs."""

    def __init__(self, data: Path, environment: dict[str, str]) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(SCRIPT), "serve", str(data)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env={**os.environ, **environment},
        )  # fmt: skip

    def run(self, kind: str, folder: Path, die: str = "", kill_after: float | None = None) -> int:
        """How a training ended."""
        assert self._process.stdin is not None and self._process.stdout is not None
        asked = {"kind": kind, "folder": str(folder), "die": die, "kill_after": kill_after}
        self._process.stdin.write(json.dumps(asked) + "\n")
        self._process.stdin.flush()
        return int(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait(60)
        self._process.stdout.close()


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trainings]:
    folder = tmp_path_factory.mktemp("resume")
    rng = np.random.default_rng(0)
    table = pa.table(
        {f"c{number}": rng.standard_normal(70, np.float32) for number in range(8)} | {"label": rng.integers(0, 4, 70)}
    )
    pq.write_table(table, folder / "data.parquet", row_group_size=20)
    (folder / "store").mkdir()
    server = Trainings(
        folder / "data.parquet", {"LEGROOM_DIR": str(folder / "store"), "LEGROOM_SHM": str(folder / "store")}
    )
    yield server
    server.close()


@pytest.fixture(scope="module")
def uninterrupted(trainings: Trainings, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind in KINDS:
        folder = tmp_path_factory.mktemp(kind)
        assert trainings.run(kind, folder) == 0
        found[kind] = end_of(folder)
        assert found[kind]["steps"] == STEPS
    return found


def end_of(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "end").read_text())
    return read


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("moment", ["before", "during", "after"])
def test_killed_at_every_step(
    trainings: Trainings, uninterrupted: dict[str, Any], tmp_path: Path, kind: str, moment: str
) -> None:
    """``before`` and ``during`` its save a step is lost and done again; ``after`` it nothing is."""
    for step in range(1, STEPS + 1):
        assert trainings.run(kind, tmp_path, f"{step}-{moment}") == -signal.SIGKILL
        assert (tmp_path / "last.pt").exists() == (step > 1 or moment == "after")
        if moment != "after":  # or the next life would die at this step again
            assert trainings.run(kind, tmp_path, f"{step}-after") == -signal.SIGKILL
    assert trainings.run(kind, tmp_path) == 0
    assert end_of(tmp_path) == uninterrupted[kind]


@pytest.mark.parametrize("kind", KINDS)
def test_killed_at_random_moments(
    trainings: Trainings, uninterrupted: dict[str, Any], tmp_path: Path, kind: str
) -> None:
    moments = random.Random(kind)
    for number in range(20):
        folder, deaths = tmp_path / str(number), 0
        folder.mkdir()
        for _ in range(8):
            if trainings.run(kind, folder, kill_after=moments.uniform(0.01, 0.06)) == 0:
                break
            deaths += 1
        else:
            assert trainings.run(kind, folder) == 0
        assert end_of(folder) == uninterrupted[kind]
        if deaths:
            return
    raise AssertionError("each training had ended before it was killed")  # once in a while it is: again
