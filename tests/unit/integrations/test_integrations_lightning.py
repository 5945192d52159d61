"""The callback in real Lightning runs of a tiny model."""

from __future__ import annotations

import logging
import pickle
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from integrations.fake_watch import FakeWatch, filling
from torch.utils.data import DataLoader, TensorDataset

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*")  # Lightning's own advice about tiny trainings
]


@pytest.fixture(scope="module", autouse=True)
def _lightning() -> None:
    """Imported here, which takes seconds, and not by every process that only looks for tests."""
    with warnings.catch_warnings(action="ignore"):
        pytest.importorskip("lightning.pytorch")


@pytest.fixture(autouse=True)
def _no_memory_of_other_runs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def model() -> Any:
    import lightning.pytorch as pl

    class Tiny(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 2)

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return torch.nn.functional.cross_entropy(self.layer(batch[0]), batch[1])

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), 0.1)

    return Tiny()


class Numbers:
    """What reached the trainer's logger."""

    def __new__(cls) -> Any:
        from lightning.pytorch.loggers.logger import Logger

        class Recorder(Logger):
            def __init__(self) -> None:
                self.seen: list[tuple[int | None, dict[str, float]]] = []

            name = version = "recorder"

            def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
                self.seen.append((step, dict(metrics)))

            def log_hyperparams(self, *_: Any, **__: Any) -> None: ...

        return Recorder()


def trainer(folder: Path, callbacks: list[Any], **more: Any) -> Any:
    import lightning.pytorch as pl

    return pl.Trainer(
        accelerator="cpu", devices=1, callbacks=callbacks, enable_checkpointing=False, enable_progress_bar=False,
        enable_model_summary=False, default_root_dir=folder, **more,
    )  # fmt: skip


def loader() -> Any:
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.zeros(32, dtype=torch.long)), batch_size=4)


def test_alarms_blocks_and_a_checkpoint_in_time(
    watches: list[FakeWatch], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import lightning.pytorch as pl

    from legroom.integrations.lightning import LegroomCallback

    class Alarming(pl.Callback):
        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
            if trainer.global_step == 5:
                watches[0].raise_alarm(filling(50))

    numbers, callback = Numbers(), LegroomCallback(log=tmp_path / "run.jsonl")
    caplog.set_level(logging.INFO)
    training = trainer(tmp_path, [Alarming(), callback], logger=numbers, max_epochs=2, accumulate_grad_batches=2)
    training.fit(model(), loader())
    assert watches[0].left == 1 and watches[0].steps == training.global_step == 8
    assert watches[0].marks == ["epoch 0", "epoch 1"]
    blocks = [record for record in caplog.records if record.message.startswith("epoch ")]
    assert len(blocks) == 2 and {record.name for record in blocks} == {"lightning.pytorch.legroom"}
    assert "effective batch: 8" in blocks[0].message and "memory after the model" in blocks[0].message
    assert (6, {"legroom/ram-filling": 1.0, "legroom/ram-filling/seconds_left": 50.0}) in numbers.seen
    (saved,) = tmp_path.glob("*.ckpt")
    assert saved.name == "legroom-step6.ckpt"
    # What was saved is a checkpoint that Lightning goes on from.
    again = trainer(tmp_path, [], logger=False, max_epochs=2, accumulate_grad_batches=2)
    again.fit(model(), loader(), ckpt_path=saved, weights_only=False)
    assert again.global_step == 8


def test_a_failed_training_run_ends_its_watch_and_is_not_hidden(watches: list[FakeWatch], tmp_path: Path) -> None:
    from legroom.integrations.lightning import LegroomCallback

    broken = model()
    type(broken).training_step = lambda self, batch, index: 1 / 0
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, [LegroomCallback(tune="off")], logger=False, max_epochs=1).fit(broken, loader())
    assert watches[0].left == 1


def test_the_class_is_one_and_is_found_by_pickle() -> None:
    from legroom.integrations import lightning

    assert pickle.loads(pickle.dumps(lightning.LegroomCallback)) is lightning.LegroomCallback
