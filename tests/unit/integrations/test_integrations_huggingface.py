"""The callback in a real Trainer with a tiny model, offline."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.fake_watch import FakeWatch, filling

pytestmark = pytest.mark.filterwarnings("ignore:.*")  # of the frameworks about each other


@pytest.fixture(scope="module", autouse=True)
def _frameworks() -> None:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    with warnings.catch_warnings(action="ignore"):
        for name in ("transformers", "accelerate"):
            pytest.importorskip(name)


@pytest.fixture(autouse=True)
def _alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


class Tiny(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        scores = self.layer(x)
        return {"loss": torch.nn.functional.cross_entropy(scores, labels), "logits": scores}


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 32

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"x": torch.full((4,), float(index)), "labels": torch.tensor(index % 2)}


def trainer(folder: Path, callback: Any, *more: Any, **settings: Any) -> Any:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        str(folder), use_cpu=True, per_device_train_batch_size=4, num_train_epochs=2, save_strategy="no",
        report_to=[], disable_tqdm=True, gradient_accumulation_steps=2, dataloader_pin_memory=False, **settings,
    )  # fmt: skip
    return Trainer(Tiny(), arguments, train_dataset=Rows(), callbacks=[*more, callback])


def alarming(watches: list[FakeWatch]) -> Any:
    from transformers import TrainerCallback

    class Alarming(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 5:
                watches[0].raise_alarm(filling(50))

    return Alarming()


@pytest.mark.parametrize("through_trainer", [False, True])
def test_alarms_blocks_and_a_checkpoint_in_time(
    watches: list[FakeWatch], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, through_trainer: bool
) -> None:
    from legroom.integrations.guard import unwrap_loader
    from legroom.integrations.huggingface import LegroomCallback
    from legroom.records.settings_and_overrides import Settings

    loaders: list[Any] = []
    monkeypatch.setattr(
        "legroom.integrations.guard.retune",
        lambda loader, **_: (loaders.append(unwrap_loader(loader)), (Settings(4, 2, num_workers=1), None))[1],
    )
    shown: list[logging.LogRecord] = []
    handler = logging.Handler()
    handler.emit = shown.append  # type: ignore[method-assign]
    logger = logging.getLogger("transformers.legroom")
    logger.addHandler(handler)
    callback = LegroomCallback()
    training = trainer(tmp_path, callback, alarming(watches), log_level="info")
    if through_trainer:
        callback.log = training.log
    try:
        training.train()
    finally:
        logger.removeHandler(handler)
    assert watches[0].left == 1 and watches[0].steps == training.state.global_step == 8
    blocks = [record.getMessage() for record in shown if record.getMessage().startswith("epoch ")]
    assert len(blocks) == 2 and "effective batch: 8" in blocks[0] and "num_workers: 0 → 1" in blocks[0]
    assert loaders[0].num_workers == 1  # and was trained with, from the first epoch on
    (told,) = (entry for entry in training.state.log_history if "legroom/ram-filling" in entry)
    assert told["legroom/ram-filling/seconds_left"] == 50.0 and told["step"] == 6
    assert [path.name for path in tmp_path.glob("checkpoint-*")] == ["checkpoint-6"]
    assert (tmp_path / "checkpoint-6" / "trainer_state.json").is_file()
