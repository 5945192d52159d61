"""`legroom check --share`: names what differs when another process makes the same batch."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import pytest
from click.testing import CliRunner

from legroom.cli.check import command
from legroom.loader.measure import compare_batches_made_twice

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
DATASETS = """
import random, time
import torch

class Sound:
    def __len__(self): return 24
    def __getitem__(self, i): return {"x": torch.rand(3) + i, "crop": random.random()}

class Unsound(Sound):
    calls = 0
    def __getitem__(self, i):
        Unsound.calls += 1
        return {**super().__getitem__(i), "read": time.time_ns(), "call": Unsound.calls}

class Stream(torch.utils.data.IterableDataset):
    at, saved = 0, True
    def __iter__(self):
        for i in range(self.at, 40):
            self.at = i + 1
            yield {"i": i, "x": torch.rand(3)}
    def state_dict(self): return {"at": self.at if self.saved else 0}
    def load_state_dict(self, state): self.at = state["at"]

class Forgetful(Stream):
    saved = False
"""


def made_in_fork(
    dataset: str, collate: str | None, batch_size: int, _timeout: float, _seed: str, backwards: str
) -> Any:
    """As ``_made``, in a fork of this process, which has torch, instead of in a process that imports it."""
    with TemporaryFile("w+") as output:
        child = os.fork()
        if child == 0:
            try:
                sys.stdout, sys.argv = output, ["", dataset, collate or "", str(batch_size), backwards]
                compare_batches_made_twice.main()
                output.flush()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        output.seek(0)
        return json.loads(output.read())


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_data.py").write_text(DATASETS)
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    given = ["--batch", "8", "--share", "--timeout", "5m", "--json", "--dataset"]
    sound = call(command, [*given, "share_check_data:Sound"], standalone_mode=False)
    assert sound.return_value == 0, sound.output
    assert json.loads(sound.output) == {"schema": "legroom.check.share/1", "batches": 3, "differing": {}}
    monkeypatch.setattr(compare_batches_made_twice, "_made", made_in_fork)
    unsound = call(command, [*given, "share_check_data:Unsound"], standalone_mode=False)
    assert unsound.return_value == 1
    assert json.loads(unsound.output)["differing"]["0"] == ["['read']", "['call']"]


def test_a_stream_is_resumed_from_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_data.py").write_text(DATASETS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(compare_batches_made_twice, "_made", made_in_fork)
    given = ["--batch", "8", "--share", "--timeout", "5m", "--json", "--dataset"]
    for name, differing in (("Stream", {}), ("Forgetful", {"2": ["['i']"], "3": ["['i']"]})):
        made = CliRunner().invoke(command, [*given, f"share_check_data:{name}"], standalone_mode=False)
        assert json.loads(made.output) == {"schema": "legroom.check.share/1", "batches": 4, "differing": differing}
