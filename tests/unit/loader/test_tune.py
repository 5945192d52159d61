"""legroom.tune: measures, chooses, obeys, adapts, remembers."""

from __future__ import annotations

import json
import logging
import random
import time
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import tune_data
from machines import GB, MB, healthy, with_pool
from torch.utils.data import DataLoader

import legroom
from legroom.errors import DatasetFailed, UsageError
from legroom.loader.measure.dataloader_throughput import time_step
from legroom.loader.tune import legroom_tune
from legroom.loader.tune.remembered_settings import key_of, last_settings, remember
from legroom.records.loader_settings_and_flags import VARIABLE
from legroom.records.settings_and_overrides import Settings


@pytest.fixture(autouse=True)
def _own_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name in ("WORLD_SIZE", "RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def tuned(dataset: Any = tune_data.images, **wishes: Any) -> Settings:
    wishes.setdefault("batch_size", 4)
    wishes.setdefault("machine", healthy())
    wishes.setdefault("loader", "torch")
    return legroom.tune(dataset, **wishes)


def test_settings_feed_a_real_loader() -> None:
    settings = tuned(effective_batch=16)
    assert settings.effective_batch == 16 and settings.accumulation == 4
    batches = list(DataLoader(tune_data.images, **settings.loader()))
    assert [len(labels) for _, labels in batches] == [4, 4]
    assert set(settings.why) >= {"batch_size", "accumulation", "num_workers", "pin_memory", "low_memory", "threads"}


def test_seeded_random_numbers_stay_as_they_were() -> None:
    class Noisy(tune_data.Images):
        def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
            return torch.rand(4) + random.random() + numpy.random.rand(), index

    def numbers() -> tuple[float, float, float]:
        return float(torch.rand(1)), random.random(), float(numpy.random.rand())

    def seeded() -> None:
        torch.manual_seed(1)
        random.seed(1)
        numpy.random.seed(1)

    seeded()
    expected = numbers()
    seeded()
    tuned(Noisy())
    assert numbers() == expected


def test_a_loader_stands_for_its_dataset_and_collate() -> None:
    settings = tuned(tune_data.loader)
    assert settings.measured is not None and len(settings.measured.tensors) == 2


def test_the_step_is_timed_with_real_batches() -> None:
    seen = []

    def step(batch: Any) -> None:
        seen.append(batch[0].shape)
        time.sleep(0.01)

    step_found = time_step(tune_data.images, None, 4, step)
    assert step_found.seconds >= 0.01 and step_found.cpu_seconds < 0.01
    assert set(seen) == {(4, 3, 16, 16)}
    assert "step" in tuned(tune_data.Computing(), step=step).why["num_workers"] or len(seen) > 3
    with pytest.raises(UsageError, match="ZeroDivisionError"):
        tuned(step=lambda batch: 1 / 0)
    with pytest.raises(UsageError, match="not both"):
        tuned(step=step, step_seconds=1.0)
    with pytest.raises(UsageError, match="step_seconds must be"):
        tuned(step_seconds=-1.0)


def test_nonsense_is_refused_before_anything_is_measured() -> None:
    class Untouchable:
        def __getitem__(self, index: int) -> None:
            raise AssertionError("measured")

    for wishes in ({"batch_size": 0}, {"effective_batch": 6}, {"preset": "fast"}, {"nonsense": 1}, {"num_workers": -1}):
        with pytest.raises(UsageError):
            tuned(Untouchable(), **wishes)


def test_overrides_by_name_and_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    assert tuned(num_workers=3, prefetch_factor=2).loader()["num_workers"] == 3
    monkeypatch.setenv(VARIABLE, json.dumps({"num_workers": 1, "prefetch_factor": 1, "batch_size": 2}))
    settings = tuned(num_workers=3, effective_batch=8)
    assert (settings.num_workers, settings.batch_size, settings.accumulation) == (1, 2, 4)
    assert "set by you" in settings.why["num_workers"]


def test_ranks_come_from_the_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert tuned(effective_batch=16).accumulation == 2
    assert tuned(effective_batch=16, ranks=1).accumulation == 4


def test_called_again_it_adapts_and_reports_it(caplog: pytest.LogCaptureFixture) -> None:
    first = tuned(tune_data.Waiting(), batch_size=2)
    assert first.num_workers > 1
    scarce = with_pool(healthy(), "shm", 64 * MB, 64 * MB - 8192, 8192)
    drawn = []
    dataset = tune_data.Waiting()
    dataset.__class__ = type("Counted", (tune_data.Waiting,), {"__getitem__": lambda self, index: drawn.append(index)})
    with caplog.at_level(logging.INFO, "legroom"):
        second = tuned(dataset, batch_size=2, previous=first, machine=scarce)
    assert not drawn, "what was measured before is used again"
    assert second.num_workers < first.num_workers and second.effective_batch == first.effective_batch
    assert f"num_workers {first.num_workers} → {second.num_workers}" in caplog.text and "shm" in caplog.text


def test_the_last_settings_that_worked_are_remembered() -> None:
    first = tuned(num_workers=1)
    assert last_settings(key_of(tune_data.images)) is None, "not known to work yet"
    tuned(previous=first)
    kept = last_settings(key_of(tune_data.images))
    assert kept is not None and kept.values() == first.values()
    assert last_settings(key_of(tune_data.images, script="elsewhere.py")) is None
    assert tuned(previous="last").batch_size == 4


def test_a_broken_memory_is_no_memory(tmp_path: Path) -> None:
    key = key_of("data:train", script="train.py")
    assert remember("settings", key, Settings(8, num_workers=2))
    (file,) = (tmp_path / "legroom" / "settings").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    for text in ("", "[]", "{}", '{"schema": "legroom.settings/1", "key": "other", "settings": {}}'):
        file.write_text(text)
        assert last_settings(key) is None
    file.unlink()
    file.mkdir()
    assert not remember("settings", key, Settings(8)) and last_settings(key) is None


def test_climbing_really_runs(caplog: pytest.LogCaptureFixture) -> None:
    settings = tuned(tune_data.Images(), batch_size=2, climb=True, preset="development")
    assert "measured step by step, 0 × 1: " in settings.why["num_workers"] and settings.num_workers <= 1
    assert last_settings(key_of(tune_data.images)) is not None


def test_climbing_that_fails_at_once_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(legroom_tune, "run_loader_in_child", lambda *_: "killed")
    with pytest.raises(DatasetFailed, match="without workers"):
        tuned(climb=True)
    assert last_settings(key_of(tune_data.images)) is None


def test_a_loader_fixed_by_name_is_measured_and_planned() -> None:
    settings = tuned(tune_data.Waiting(), loader="legroom", loader_kind="torch")
    assert settings.loader_kind == "torch" and settings.measured is not None and settings.plan is not None
    assert settings.measured.transport is not None and "torch loader" in settings.measured.transport.source
    assert settings.num_workers == 0 or settings.plan.need.shm > settings.measured.batch_bytes


def test_too_little_memory_warns(caplog: pytest.LogCaptureFixture) -> None:
    none = with_pool(healthy(), "ram", GB, GB - 4096, 4096)
    with caplog.at_level(logging.WARNING, "legroom"):
        settings = tuned(machine=none)
    assert settings.plan is not None and settings.plan.verdict == "too-big" and "ram" in caplog.text


def test_a_name_is_not_taken_for_a_dataset_of_characters() -> None:
    with pytest.raises(UsageError, match=r"'data:train_set' is not a dataset"):
        legroom.tune("data:train_set", batch_size=4)
