"""What every adapter shares: when a checkpoint is due, the epoch's block, tuning a loader that exists."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from integrations.fake_watch import FakeWatch, filling
from torch.utils.data import DataLoader, TensorDataset

import legroom
from legroom.errors import UsageError
from legroom.integrations.guard import (
    CheckpointSchedule,
    Guard,
    apply_settings,
    disk_full,
    epoch_lines,
    memory_lines,
    memory_snapshot,
    retune,
    threatens,
)
from legroom.records.finding_and_alarm import Alarm
from legroom.records.machine import Pool
from legroom.records.settings_and_overrides import Settings

MB = 1 << 20


@pytest.fixture(autouse=True)
def _no_memory_of_other_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


# When a checkpoint is due.


@pytest.mark.parametrize(
    ("alarm", "expected"),
    [
        (filling(60), True),
        (filling(600), False),
        (filling(600, "critical"), True),
        (filling(60, code="shm-filling"), True),
        (filling(60, code="disk-filling"), False),
        (Alarm("ram-near-limit", "ram", "warning", "", 0.0), False),
        (Alarm("ram-near-limit", "ram", "critical", "", 0.0), True),
        (Alarm("swap-moving", "swap", "critical", "", 0.0), False),
    ],
)
def test_which_alarms_make_a_checkpoint_due(alarm: Alarm, expected: bool) -> None:
    assert threatens(alarm, horizon=180) is expected


def test_one_checkpoint_per_alarm_and_another_much_later() -> None:
    due, alarm, other = CheckpointSchedule(horizon=100), filling(50), filling(50, code="gpu-filling")
    assert due.ask([], 0) is None
    assert due.ask([filling(500)], 0) is None
    assert due.ask([alarm], 1) is alarm
    due.saved([alarm], 1)
    assert due.ask([alarm], 2) is None
    assert due.ask([alarm, other], 3) is other
    due.saved([alarm, other], 3)
    assert due.ask([alarm, other], 100) is None
    assert due.ask([alarm, other], 203) is alarm


def test_a_full_disk_prevents_a_checkpoint() -> None:
    low = Alarm("disk-low", "disk", "critical", "", 0.0)
    assert disk_full([filling(), low]) is low
    assert disk_full([filling(), replace(low, level="warning")]) is None


# The block.


def settings() -> Settings:
    return Settings(
        32, 2, 3, low_memory=True,
        why={"accumulation": "accumulation 2: 32 × 2 × 3 ranks = 192", "num_workers": "workers 0: too little RAM",
             "pin_memory": "pin_memory off: too little RAM"},
    )  # fmt: skip


def test_the_epoch_log_has_settings_and_memory() -> None:
    ram, none = Pool("ram", 1000 * MB, 900 * MB, 100 * MB, "cgroup"), Pool("swap", 0, 0, 0, "")
    card = Pool("gpu0", 20 << 30, 5 << 30, 15 << 30, "NVML")
    held = "cuda:0", 1471 * MB, 2290 * MB
    looks = [memory_lines("at start", ram, none), memory_lines("at step 0", ram, none, (card,), (held,))]
    text = epoch_lines(4, settings(), looks, ["a note"])
    assert text.splitlines()[:3] == ["epoch 4", "  mode: low-memory: map or stream the data", "  accumulation 2: 32 × 2 × 3 ranks = 192"]  # fmt: skip
    assert "effective batch: 192" in text and "a note" in text
    assert "memory at start: 900 MB of 1000 MB used (90.0%); swap none" in text
    assert "cuda:0: 1.44 GB allocated, 2.24 GB reserved by this process" in text
    assert "gpu0: 5 GB of 20 GB used (25.0%)" in text


def test_unknown_memory_is_logged_as_unknown() -> None:
    dark = Pool("ram", None, None, None, "", "no /proc")
    assert "memory now: unknown (no /proc)" in epoch_lines(0, None, [memory_lines("now", dark, dark)])


def test_a_memory_snapshot_of_this_machine() -> None:
    cuda = SimpleNamespace(
        is_initialized=lambda: True,
        device_count=lambda: 2,
        memory_allocated=lambda i: i,
        memory_reserved=lambda i: 2 * i,
    )
    found = memory_snapshot("now", torch=SimpleNamespace(cuda=cuda))
    assert found[1:3] == [f"    cuda:{i}: {i} B allocated, {2 * i} B reserved by this process" for i in range(2)]
    assert re.match(r"  memory now: .+ of .+ used \(.+%\); swap ", found[0])


# Tuning a loader that exists.


def dataset(rows: int = 64) -> TensorDataset:
    return TensorDataset(torch.zeros(rows, 4), torch.zeros(rows, dtype=torch.long))


def test_a_loader_is_tuned_again_and_keeps_its_batch() -> None:
    loader = DataLoader(dataset(), batch_size=8)
    found, why_not = retune(loader, accumulation=2, previous=None)
    assert found is not None and why_not is None
    assert (found.batch_size, found.accumulation, found.effective_batch) == (8, 2, 16)
    again, _ = retune(loader, accumulation=2, previous=found)
    assert again is not None and again.measured is found.measured  # nothing is measured twice


def test_what_cannot_be_tuned_has_a_note() -> None:
    assert retune([1, 2], accumulation=1, previous=None)[1] == "not tuned: list is not a DataLoader"
    unbatched = DataLoader(dataset(), batch_size=None)
    assert "no batch_size" in str(retune(unbatched, accumulation=1, previous=None)[1])


@pytest.mark.parametrize("wrapped", [False, True])
def test_workers_change_between_epochs(wrapped: bool) -> None:
    inner = DataLoader(dataset(), batch_size=8)
    loader: Any = SimpleNamespace(base_dataloader=inner) if wrapped else inner
    told = apply_settings(loader, Settings(8, num_workers=1, prefetch_factor=4))
    assert "num_workers: 0 → 1" in told and "prefetch_factor: None → 4" in told
    assert len(list(inner)) == 8
    assert "num_workers: 1 → 0" in apply_settings(loader, Settings(8))
    assert len(list(inner)) == 8
    assert apply_settings(loader, Settings(8)) == []


def test_loaders_that_must_not_change_are_left_alone() -> None:
    lasting = DataLoader(dataset(), batch_size=8, num_workers=1, persistent_workers=True)
    assert "persistent" in apply_settings(lasting, Settings(8))[0] and lasting.num_workers == 1
    ours = legroom.DataLoader(dataset(), batch_size=8)
    assert "created without workers" in apply_settings(ours, Settings(8, num_workers=1))[0] and ours.num_workers == 0


# The guard.


def test_a_guarded_training_run(watches: list[FakeWatch], caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.INFO, logger="legroom")
    numbers: list[dict[str, float]] = []
    loader = DataLoader(dataset(), batch_size=8)
    with Guard(log=tmp_path / "run.jsonl") as guard:
        guard.report = lambda more: numbers.append(dict(more))
        guard.model_ready()
        assert guard.epoch(0, loader) is guard.settings is not None
        assert not any(record.message.startswith("epoch 0") for record in caplog.records)
        assert guard.step() is None
        (shown,) = (record.message for record in caplog.records if record.message.startswith("epoch 0"))
        for part in (
            "mode: normal",
            "effective batch: 8",
            "memory at start",
            "memory after the model",
            "memory at step 0",
        ):
            assert part in shown
        assert guard.step() is None
        watches[0].raise_alarm(filling(50))
        assert guard.step() == "ram-filling in about 50 s"
        assert guard.step() is None
        assert numbers == [{"legroom/ram-filling": 1.0, "legroom/ram-filling/seconds_left": 50.0}]
        assert guard.epoch(1, loader) is not None
    assert (
        watches[0].log == tmp_path / "run.jsonl"
        and watches[0].steps == 4
        and watches[0].marks == ["epoch 0", "epoch 1"]
    )
    assert (watches[0].entered, watches[0].left) == (1, 1)
    assert any(record.message.startswith("epoch 1") for record in caplog.records)  # though it had no step
    assert sum("checkpoint requested" in record.message for record in caplog.records) == 1


def test_ranks_agree_every_few_steps(watches: list[FakeWatch]) -> None:
    asked: list[list[int]] = []

    class Two:
        world_size = 2

        def maximum(self, values: list[int]) -> list[int]:
            asked.append(list(values))
            return [1]

    guard = Guard(agree_every=3)
    guard.start()
    guard._ranks = Two()  # type: ignore[assignment]
    assert [guard.step() for _ in range(2)] == [None, None]
    assert guard.step() == "another rank is about to run out of memory"
    assert asked == [[False]]


def test_no_checkpoint_onto_a_full_disk(watches: list[FakeWatch], caplog: pytest.LogCaptureFixture) -> None:
    with Guard() as guard:
        watches[0].alarms = (filling(50), Alarm("disk-low", "disk", "critical", "256 MB left", 0.0))
        assert guard.step() is None
        assert "checkpoint skipped" in caplog.text
        watches[0].alarms = (filling(50),)
        assert guard.step() is None  # it was told once, and is asked again later


def test_other_ranks_write_their_own_logs(
    watches: list[FakeWatch], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "3")
    with Guard(log=tmp_path / "run.jsonl"):
        assert watches[0].log == tmp_path / "run-rank2.jsonl"


def test_an_unknown_value_of_tune_is_refused() -> None:
    with pytest.raises(UsageError, match="tune must be one of"):
        Guard(tune="always")  # type: ignore[arg-type]


def test_importing_the_adapters_needs_no_framework() -> None:
    code = (
        "import sys\n"
        "for name in ('lightning', 'pytorch_lightning', 'transformers', 'accelerate', 'deepspeed', 'ray', 'torch'):\n"
        "    sys.modules[name] = None\n"
        "from legroom.integrations import accelerate, checkpoint, deepspeed, huggingface, lightning, ray\n"
        "from legroom.errors import MissingPackage\n"
        "for module in (lightning, huggingface):\n"
        "    try: module.LegroomCallback\n"
        "    except MissingPackage as problem: print(problem.fix[0])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split("\n")[:2] == ["pip install lightning", "pip install transformers"], done.stderr
