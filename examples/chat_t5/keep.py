"""The checkpoint: one file, from which a killed training goes on at the same row with the same weights.

Covers: model, optimizer, schedule, every rank's place in the data. Does not cover: when to save (training.py), how a
file is made whole or not at all (legroom.integrations.checkpoint). Random numbers are drawn from the seed and the step,
so their generators need not be kept.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import zero
from accelerate import Accelerator
from accelerate.utils import gather_object
from rows import Shared, Streamed

from legroom.errors import UnreadableSource, UsageError
from legroom.integrations import checkpoint

NAME = "last.pt"


@dataclass(frozen=True)
class Place:
    """Where a training stands."""

    epoch: int = 0
    step: int = 0  # optimizer steps done of it
    low_memory: bool | None = None  # how the epoch that is under way reads its rows
    rows: list[dict[str, Any]] | None = None  # where each rank stands in them
    step_seconds: float | None = None  # of the last whole epoch


class Checkpoint:
    """The parts of a training, and their file."""

    def __init__(
        self, accelerator: Accelerator, flags: argparse.Namespace, model: Any, optimizer: Any, schedule: Any
    ) -> None:
        self._accelerator, self._folder = accelerator, flags.ckpt_dir
        self._parts: dict[str, Any] = {"schedule": schedule}
        if not zero.in_use(accelerator):
            self._parts |= {"model": accelerator.unwrap_model(model), "optimizer": optimizer}
        effective = flags.batch_size_per_gpu * flags.gradient_accumulation_steps * accelerator.num_processes
        self._made_with = {"effective_batch": effective, "seed": flags.seed}

    @property
    def path(self) -> Path:
        return self._folder / NAME

    def save(self, place: Place, rows: Streamed | Shared) -> None:
        """All ranks together; the first writes."""
        amid = place.step > 0
        states = gather_object([rows.state()]) if amid else None
        name = f"zero-{place.epoch:04}-{place.step:08}"
        if zero.in_use(self._accelerator):
            zero.save(self._accelerator, self._folder, name)
        if self._accelerator.is_main_process:
            kept = asdict(place) | {"rows": states, "low_memory": rows.low_memory if amid else None}
            checkpoint.save(self.path, place=kept, made_with=self._made_with, **self._parts)
            zero.forget(self._folder, but=name)

    def restore(self) -> Place | None:
        """Bring everything to where it was; None where there is no checkpoint."""
        try:
            kept = checkpoint.restore(self.path, **self._parts)
            if kept is None:
                return None
            place = Place(**kept["place"])
            if zero.in_use(self._accelerator):
                zero.load(self._accelerator, self._folder, f"zero-{place.epoch:04}-{place.step:08}")
        except (
            RuntimeError,
            ValueError,
            KeyError,
            TypeError,
            OSError,
        ) as problem:  # torch's, of another model
            raise UnreadableSource(
                f"{self.path} is no checkpoint of this training",
                why=str(problem).strip().partition("\n")[0],
                fix=("give the flags it was made with", "or begin anew: --is_keep_training=False"),
            ) from problem
        if kept["made_with"] != self._made_with:
            raise UsageError(
                f"{self.path} was made with other settings",
                why=f"it has {kept['made_with']} and this is {self._made_with}",
                fix=(
                    "keep batch × accumulation × ranks, and the seed",
                    "or begin anew: --is_keep_training=False",
                ),
            )
        return place
