"""Checkpoints: everything back where it was, whole or not there, and refusals."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from legroom.errors import UnreadableSource, UsageError
from legroom.integrations import checkpoint


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


def test_parts_values_and_every_generator_come_back(tmp_path: Path) -> None:
    path, model = tmp_path / "last.pt", torch.nn.Linear(2, 2)
    weights = model.weight.detach().clone()
    checkpoint.save(path, model=model, step=3, names=["a", "b"])
    expected = draws()
    with torch.no_grad():
        model.weight.zero_()
    assert checkpoint.restore(path, model=model) == {"step": 3, "names": ["a", "b"]}
    assert torch.equal(model.weight, weights)
    assert draws() == expected


def test_restore_without_a_file_changes_nothing(tmp_path: Path) -> None:
    expected = torch.get_rng_state()
    assert checkpoint.restore(tmp_path / "last.pt", model=torch.nn.Identity()) is None
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_failed_save_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, step=1)

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        checkpoint.save(path, step=2)
    assert checkpoint.restore(path) == {"step": 1}
    assert [one.name for one in tmp_path.iterdir()] == ["last.pt"]


@pytest.mark.parametrize(
    "value",
    [np.float64(0.5), np.zeros(2), np.str_("a"), {"best": Path("model.pt")}],
    ids=lambda one: type(one).__name__,
)
def test_what_could_not_be_restored_does_not_replace_a_checkpoint(value: Any, tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, model=torch.nn.Linear(2, 2), best=0.25)
    with pytest.raises(UsageError, match="could not be restored: best") as caught:
        checkpoint.save(path, model=torch.nn.Linear(2, 2), best=value)
    assert "is not a plain value" in caught.value.why
    assert checkpoint.restore(path, model=torch.nn.Linear(2, 2)) == {"best": 0.25}
    assert [one.name for one in tmp_path.iterdir()] == ["last.pt"]


def test_wrong_parts_other_files_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    checkpoint.save(path, model=torch.nn.Linear(2, 2))
    with pytest.raises(UsageError, match="do not match"):
        checkpoint.restore(path, model=torch.nn.Linear(2, 2), optimizer=torch.nn.Identity())
    with pytest.raises(UsageError, match="saved: model; to restore: "):
        checkpoint.restore(path)
    torch.save({"model": {}}, tmp_path / "other.pt")
    with pytest.raises(UsageError, match="not a Legroom checkpoint"):
        checkpoint.restore(tmp_path / "other.pt")
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(UnreadableSource):
        checkpoint.restore(path, model=torch.nn.Linear(2, 2))


def test_a_file_from_elsewhere_runs_no_code(tmp_path: Path) -> None:
    class Evil:
        def __reduce__(self) -> tuple[object, ...]:
            return os.mkdir, (str(tmp_path / "evil"),)

    torch.save({"legroom_checkpoint": 1, "states": {}, "values": Evil(), "random": {}}, tmp_path / "last.pt")
    with pytest.raises(UnreadableSource):
        checkpoint.restore(tmp_path / "last.pt")
    assert not (tmp_path / "evil").exists()


def test_paths_that_are_none_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in ("", 3):
        for function in (checkpoint.save, checkpoint.restore):
            with pytest.raises(UsageError, match="path"):
                function(path, step=1)  # type: ignore[arg-type]
