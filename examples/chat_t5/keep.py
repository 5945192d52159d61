"""The checkpoint: one file, from which a killed run resumes at the same row with the same weights.

It holds model, optimizer, schedule and each rank's position in the data. Random numbers are drawn from the seed and the
step, so the state of their generators is not saved.
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
from legroom.messages import either

NAME = "last.pt"


@dataclass(frozen=True)
class Place:
    """How far a run has come."""

    epoch: int = 0
    step: int = 0  # optimizer steps done of it
    low_memory: bool | None = None  # how the current epoch reads its rows
    rows: list[dict[str, Any]] | None = None  # each rank's position in them
    step_seconds: float | None = None  # of the last whole epoch


class Checkpoint:
    """What is saved, and its file."""

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
        """Called by all ranks together; rank 0 writes."""
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
        """Restore everything; None where there is no checkpoint."""
        try:
            kept = checkpoint.restore(self.path, **self._parts)
            if kept is None:
                return None
            place = Place(**kept["place"])
            if zero.in_use(self._accelerator):
                zero.load(self._accelerator, self._folder, f"zero-{place.epoch:04}-{place.step:08}")
        except (RuntimeError, ValueError, KeyError, TypeError, OSError) as problem:  # torch's, of another model
            raise UnreadableSource(
                either(f"{self.path} is not a checkpoint of this model", f"{self.path} 不是这个模型的检查点"),
                why=str(problem).strip().partition("\n")[0],
                fix=(
                    either("pass the flags it was saved with", "使用保存它时的选项"),
                    either("or start from scratch: --is_keep_training=False", "或从头训练：--is_keep_training=False"),
                ),
            ) from problem
        if kept["made_with"] != self._made_with:
            raise UsageError(
                either(f"{self.path} was saved with other settings", f"保存 {self.path} 时的设置不同"),
                why=either(
                    f"it has {kept['made_with']} and this is {self._made_with}",
                    f"检查点为 {kept['made_with']}，现为 {self._made_with}",
                ),
                fix=(
                    either(
                        "keep batch × accumulation × ranks, and the seed",
                        "保持有效批大小（批大小 × 梯度累积 × rank 数）和随机种子不变",
                    ),
                    either("or start from scratch: --is_keep_training=False", "或从头训练：--is_keep_training=False"),
                ),
            )
        return place
