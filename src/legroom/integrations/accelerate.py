"""A guard for your own training loop under accelerate.

    with guarded(accelerator, save_to="checkpoints/last") as guard:
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        guard.model_ready()
        for epoch in range(epochs):
            guard.epoch(epoch, loader)
            for batch in loader:
                with accelerator.accumulate(model): ...
                guard.step()

Uses accelerate's accumulation, trackers and ``save_state``; guard/ does the rest. The accelerator is an argument, so
this module does not import accelerate.
"""

from __future__ import annotations

import os
from typing import Any

from legroom.integrations.guard import Guard
from legroom.records.settings_and_overrides import Settings


class AccelerateGuard(Guard):
    """A guard that uses the accelerator's accumulation, trackers and ``save_state``."""

    def __init__(self, accelerator: Any, save_to: str | os.PathLike[str] | None, **options: Any) -> None:
        super().__init__(**options)
        self._accelerator, self._save_to = accelerator, save_to
        self.main = accelerator.is_local_main_process
        self.report = lambda numbers: accelerator.log(dict(numbers)) if accelerator.trackers else None

    def epoch(self, number: int, loader: Any = None, accumulation: int | None = None) -> Settings | None:
        """An epoch over that prepared loader begins."""
        return super().epoch(number, loader, accumulation or self._accelerator.gradient_accumulation_steps)

    def step(self) -> str | None:
        """A batch is done. Returns why a checkpoint was saved, or None. Does nothing between two optimizer steps."""
        if not self._accelerator.sync_gradients:
            return None
        why = super().step()
        if why is not None and self._save_to is not None:
            self._accelerator.save_state(os.fspath(self._save_to))
        return why


def guarded(accelerator: Any, save_to: str | os.PathLike[str] | None = None, **options: Any) -> AccelerateGuard:
    """A guard for this accelerator's training run; use it in a ``with`` statement.

    Args:
        accelerator: The ``accelerate.Accelerator`` of the run.
        save_to: Where ``accelerator.save_state`` saves a checkpoint that is due. None: ``step`` returns why one is due,
            and your loop saves it.
        **options: Those of ``legroom.integrations.guard.Guard``.
    """
    return AccelerateGuard(accelerator, save_to, **options)
