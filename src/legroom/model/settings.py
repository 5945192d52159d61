"""Settings chosen for a training, with the reason for each.

Covers: the settings, overriding and rolling back one at a time, and how loaders and trainers take them.
Does not cover: choosing them (budget), measuring what the choice rests on (loader).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from legroom.model.kept import TOGETHER, completed
from legroom.model.measured import Measured
from legroom.model.settings_env import checked
from legroom.model.workload import Plan
from legroom.words import say

_NO_SETTINGS = {"why", "levers", "before", "measured", "plan"}


@dataclass(frozen=True, slots=True)
class Lever:
    """Something the person may still do, and the bytes it would save."""

    name: str
    pool: str
    saves: int | None  # None: depends on the model, and has not been measured
    what: str


@dataclass(frozen=True, slots=True)
class Settings:
    """How to load and step. batch_size × accumulation × ranks is the effective batch, and is kept."""

    batch_size: int
    accumulation: int = 1
    ranks: int = 1
    num_workers: int = 0
    prefetch_factor: int | None = None
    persistent_workers: bool = False
    pin_memory: bool = False
    low_memory: bool = False  # stream the data or map them, instead of holding them in each process
    threads: int | None = None  # OMP_NUM_THREADS, MKL_NUM_THREADS
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF
    loader_kind: Literal["torch", "legroom"] = "legroom"
    why: Mapping[str, str] = field(default_factory=dict)  # by setting: one line with its number
    levers: tuple[Lever, ...] = ()
    before: Mapping[str, Any] = field(default_factory=dict)  # what an override replaced
    measured: Measured | None = None  # what the choice rests on
    plan: Plan | None = None  # what these settings need, and whether that fits

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    def values(self) -> dict[str, Any]:
        """Every setting by its name."""
        return {one.name: getattr(self, one.name) for one in fields(self) if one.name not in _NO_SETTINGS}

    def loader(self) -> dict[str, Any]:
        """Arguments of torch.utils.data.DataLoader and of legroom.DataLoader."""
        arguments: dict[str, Any] = {
            "batch_size": self.batch_size,
            "num_workers": self.num_workers,
            "pin_memory": self.pin_memory,
        }
        if self.num_workers:  # torch refuses these two without workers
            arguments["prefetch_factor"] = self.prefetch_factor or 2
            arguments["persistent_workers"] = self.persistent_workers
        return arguments

    def training_arguments(self) -> dict[str, Any]:
        """Arguments of Hugging Face's TrainingArguments."""
        arguments: dict[str, Any] = {
            "per_device_train_batch_size": self.batch_size,
            "gradient_accumulation_steps": self.accumulation,
            "dataloader_num_workers": self.num_workers,
            "dataloader_pin_memory": self.pin_memory,
        }
        if self.num_workers:
            arguments["dataloader_prefetch_factor"] = self.prefetch_factor or 2
            arguments["dataloader_persistent_workers"] = self.persistent_workers
        return arguments

    def lightning(self) -> dict[str, dict[str, Any]]:
        """Arguments of the loader, under ``loader``, and of Lightning's Trainer, under ``trainer``."""
        return {"loader": self.loader(), "trainer": {"accumulate_grad_batches": self.accumulation}}

    def environment(self) -> dict[str, str]:
        """Variables to set before the training starts: the libraries read them once."""
        variables: dict[str, str] = {}
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(self.threads)
        if self.allocator is not None:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = self.allocator
        return variables

    def override(self, **chosen: Any) -> Settings:
        """The same settings with some of them set by hand; ``roll_back`` returns to what was chosen.

        The effective batch stays: a batch set by hand changes the accumulation with it, or is refused.
        """
        wanted = completed(self.values(), checked(chosen))
        old = {name: getattr(self, name) for name in wanted}
        told = {
            name: say("{name} {value}: set by hand", name=name, value=value) for name, value in wanted.items()
        }
        return replace(self, **wanted, why={**self.why, **told}, before={**old, **self.before})

    def roll_back(self, *names: str) -> Settings:
        """What was chosen before the override, for these settings or for all; batch and accumulation go together."""
        asked = set(names or self.before)
        if asked & set(TOGETHER):
            asked |= set(TOGETHER)
        back = {name: value for name, value in self.before.items() if name in asked}
        told = {
            name: say("{name} {value}: as chosen", name=name, value=value) for name, value in back.items()
        }
        left = {name: value for name, value in self.before.items() if name not in back}
        return replace(self, **back, why={**self.why, **told}, before=left)
