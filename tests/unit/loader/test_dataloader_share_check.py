"""`legroom check --share`: names what differs when another process makes the same batch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from forked_measurements import use_forks

from legroom.cli.check import command

pytest.importorskip("torch")
pytestmark = pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork")
DATASETS = """
import random, time
import torch

class Sound:
    def __len__(self): return 24
    def __getitem__(self, i): return {"x": torch.rand(3) + i, "crop": random.random()}

class Printing(Sound):
    def __len__(self):
        print("loading", end="")
        return 24

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


def test_what_differs_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_data.py").write_text(DATASETS)
    monkeypatch.chdir(tmp_path)
    call = CliRunner().invoke
    given = ["--batch", "8", "--share", "--timeout", "5m", "--json", "--dataset"]
    sound = call(command, [*given, "share_check_data:Sound"], standalone_mode=False)
    assert sound.return_value == 0, sound.output
    assert json.loads(sound.output) == {"schema": "legroom.check.share/1", "batches": 3, "differing": {}}
    use_forks(monkeypatch.setattr)
    unsound = call(command, [*given, "share_check_data:Unsound"], standalone_mode=False)
    assert unsound.return_value == 1
    assert json.loads(unsound.output)["differing"]["0"] == ["['read']", "['call']"]


def test_a_stream_is_resumed_from_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_data.py").write_text(DATASETS)
    monkeypatch.chdir(tmp_path)
    use_forks(monkeypatch.setattr)
    given = ["--batch", "8", "--share", "--timeout", "5m", "--json", "--dataset"]
    for name, differing in (("Stream", {}), ("Forgetful", {"2": ["['i']"], "3": ["['i']"]})):
        made = CliRunner().invoke(command, [*given, f"share_check_data:{name}"], standalone_mode=False)
        assert json.loads(made.output) == {"schema": "legroom.check.share/1", "batches": 4, "differing": differing}


@pytest.mark.skipif(sys.platform != "linux", reason="a new process elsewhere")
def test_what_the_dataset_prints_is_not_the_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_data.py").write_text(DATASETS)
    monkeypatch.chdir(tmp_path)
    use_forks(monkeypatch.setattr)
    line = ["--batch", "8", "--share", "--timeout", "5m", "--json", "--dataset", "share_check_data:Printing"]
    made = CliRunner().invoke(command, line, standalone_mode=False)
    assert json.loads(made.output) == {"schema": "legroom.check.share/1", "batches": 3, "differing": {}}


@pytest.mark.skipif(sys.platform != "linux", reason="a new process elsewhere")
def test_why_the_dataset_cannot_be_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "share_check_missing.py").write_text("import a_package_that_is_not_there\n")
    monkeypatch.chdir(tmp_path)
    use_forks(monkeypatch.setattr)
    line = ["--batch", "8", "--share", "--timeout", "5m", "--dataset", "share_check_missing:Sound"]
    made = CliRunner().invoke(command, line, standalone_mode=False)
    assert "a_package_that_is_not_there" in str(made.exception) and made.exception.exit_status == 2
