"""Settings chosen for a training, with the reason for each.

Covers: the settings, overriding and rolling back one at a time, and how loaders and trainers take them.
Does not cover: choosing them (budget), measuring what the choice rests on (loader).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal


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

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

    def override(self, **chosen: Any) -> Settings:
        """The same settings with some of them set by hand; ``roll_back`` returns to what was chosen."""
        known = {one.name for one in fields(self)} - {"why", "levers", "before"}
        for name in chosen:
            if name not in known:
                raise TypeError(f"no setting is called {name!r}; there are {', '.join(sorted(known))}")
        old = {name: getattr(self, name) for name in chosen}
        return replace(
            self,
            **chosen,
            why={**self.why, **{name: f"{name} {value}: set by hand" for name, value in chosen.items()}},
            before={**old, **self.before},
        )

    def roll_back(self, *names: str) -> Settings:
        """What was chosen before the override, for these settings or for all."""
        back = {name: self.before[name] for name in names or self.before}
        return replace(
            self,
            **back,
            before={name: value for name, value in self.before.items() if name not in back},
            why={name: line for name, line in self.why.items() if name not in back},
        )
