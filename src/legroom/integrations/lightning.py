"""A Lightning callback: ``Trainer(callbacks=[LegroomCallback()])``.

Forwards Lightning's hooks to the guard (guard/) and saves Lightning's own checkpoint when one is due. Works
with ``lightning`` and ``pytorch_lightning``, whichever the program uses.

Lightning creates the first epoch's iterator before any hook: changes of the loader take effect from the second epoch.
"""

from __future__ import annotations

import logging
import shutil
import sys
from functools import cache
from pathlib import Path
from typing import Any

from legroom.integrations.guard import Guard
from legroom.messages import phrase
from legroom.system.lazy_and_optional_imports import require


class Hooks:
    """A Lightning callback: watches memory, tunes at every epoch, saves a checkpoint before memory runs out."""

    logger_name = "legroom"  # a child of Lightning's logger, which has a handler

    def __init__(self, *, checkpoints: str | None = None, **options: Any) -> None:
        """Create the callback.

        Args:
            checkpoints: A folder for the checkpoints; None: the trainer's ``default_root_dir``.
            **options: Those of ``legroom.integrations.guard.Guard``.
        """
        super().__init__()
        self.guard = Guard(**options)
        self._folder = checkpoints
        self._last: Path | None = None
        self._counted = 0

    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.guard.logger = logging.getLogger(self.logger_name)
            self.guard.main = trainer.local_rank == 0
            self.guard.report = lambda numbers: _report(trainer, numbers)
            self.guard.start()

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self.guard.model_ready()
        self._counted = trainer.global_step

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        loader = trainer.train_dataloader
        self.guard.epoch(trainer.current_epoch, loader, trainer.accumulate_grad_batches)

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == self._counted:
            return  # while accumulating, a checkpoint would lose gradients
        self._counted = trainer.global_step
        if self.guard.step() is not None:
            self._save(trainer)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        if stage == "fit":
            self.guard.end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        self.guard.end()

    def _save(self, trainer: Any) -> None:
        """Save a new file, then delete the previous one: a crash while saving loses nothing."""
        path = Path(self._folder or trainer.default_root_dir) / f"legroom-step{trainer.global_step}.ckpt"
        trainer.save_checkpoint(path)
        if self._last is not None and self._last != path and trainer.is_global_zero:
            if self._last.is_dir():
                shutil.rmtree(self._last)
            else:
                self._last.unlink(missing_ok=True)
        self._last = path


def _report(trainer: Any, numbers: Any) -> None:
    for one in trainer.loggers:
        one.log_metrics(dict(numbers), step=trainer.global_step)


@cache
def _callback_class() -> type[Any]:
    older = "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules
    module = require(
        "pytorch_lightning" if older else "lightning.pytorch", "", phrase("this callback"), package="lightning"
    )
    names = {
        "__module__": __name__,
        "__qualname__": "LegroomCallback",
        "__doc__": Hooks.__init__.__doc__,
        "logger_name": f"{module.__name__}.legroom",
    }
    return type("LegroomCallback", (Hooks, module.Callback), names)


def __getattr__(name: str) -> Any:
    if name == "LegroomCallback":
        return _callback_class()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
