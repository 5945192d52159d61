"""Settings chosen for a job, with the reason for each.

`override` and `roll_back` keep the effective batch size (batch × accumulation × ranks).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from legroom.errors import UsageError
from legroom.messages import RANKS, counted, phrase, say
from legroom.records.loader_settings_and_flags import LoaderKind, LoaderSettings, read_settings
from legroom.records.workload import Measured, Plan

TOGETHER = ("batch_size", "accumulation")  # always changed together
_PREFETCH = 2  # torch's own default


def completed(now: Mapping[str, Any], by_hand: Mapping[str, Any]) -> dict[str, Any]:
    """``by_hand`` with the settings that follow; UsageError if the effective batch would change."""
    wanted = dict(by_hand)
    if wanted.get("ranks", now["ranks"]) != now["ranks"]:
        raise UsageError(
            say("ranks={ranks} contradicts the job: it has ranks={found}", ranks=wanted["ranks"], found=now["ranks"]),
            why=say("the effective batch size depends on it"),
            fix=(say("pass the number of ranks as ranks=, not as an override"),),
        )
    step = now["batch_size"] * now["accumulation"]
    for given, other in (TOGETHER, TOGETHER[::-1]):
        if given in wanted and other not in wanted and step % wanted[given] == 0:
            wanted[other] = step // wanted[given]
    batch, times = (wanted.get(name, now[name]) for name in TOGETHER)
    if batch * times != step:
        old, new = (samples * now["ranks"] for samples in (step, batch * times))
        raise UsageError(
            say("batch {batch} × accumulation {times} would change the effective batch size", batch=batch, times=times),
            why=say(
                "{batch} × {times} × {ranks} = {new}, but {old} was requested",
                batch=batch, times=times, new=new, old=old,
                ranks=counted(now["ranks"], *RANKS),
            ),
            fix=(say("request an effective batch of {new} if you want that", new=new),),
        )  # fmt: skip
    if wanted.get("num_workers", now["num_workers"]) == 0:
        wanted.pop("prefetch_factor", None)
    elif wanted.get("prefetch_factor", now["prefetch_factor"]) is None:
        wanted["prefetch_factor"] = _PREFETCH
    return wanted


@dataclass(frozen=True, slots=True)
class Lever:
    """A further way to save memory, and the bytes it would save."""

    name: str
    pool: str
    saves: int | None  # None: depends on the model; not measured
    what: str


@dataclass(frozen=True, slots=True)
class Settings(LoaderSettings):
    """DataLoader and batch settings. batch_size × accumulation × ranks is the effective batch and never changes."""

    batch_size: int
    accumulation: int = 1
    ranks: int = 1
    num_workers: int = 0
    persistent_workers: bool = False
    pin_memory: bool = False
    low_memory: bool = False
    loader_kind: LoaderKind = "legroom"
    why: Mapping[str, str] = field(default_factory=dict)  # by setting: one line with numbers
    levers: tuple[Lever, ...] = ()
    before: Mapping[str, Any] = field(default_factory=dict)  # what an override replaced
    measured: Measured | None = None  # the measurement behind it
    plan: Plan | None = None  # what these settings need, and whether that fits

    @property
    def effective_batch(self) -> int:
        """Samples in one optimizer step over all ranks."""
        return self.batch_size * self.accumulation * self.ranks

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
        """Environment variables to set before the training run starts."""
        variables: dict[str, str] = {}
        if self.threads is not None:
            variables["OMP_NUM_THREADS"] = variables["MKL_NUM_THREADS"] = str(self.threads)
        if self.allocator is not None:
            variables["PYTORCH_CUDA_ALLOC_CONF"] = self.allocator
        return variables

    def override(self, **chosen: Any) -> Settings:
        """The same settings with some set by you; ``roll_back`` restores the recommended ones.

        The effective batch does not change: a new batch size changes the accumulation too, or is an error.
        """
        given = read_settings(chosen).given()
        wanted = completed(self.values(), given)
        old = {name: getattr(self, name) for name in wanted}
        by_you, follows = phrase("{name} {value}: set by you"), phrase("{name} {value}: follows from what you set")
        told = {
            name: say(by_you if name in given else follows, name=name, value=value) for name, value in wanted.items()
        }
        return replace(self, **wanted, why={**self.why, **told}, before={**old, **self.before})

    def roll_back(self, *names: str) -> Settings:
        """Undo an override of these settings, or of all; batch and accumulation are undone together."""
        asked = set(names or self.before)
        if asked & set(TOGETHER):
            asked |= set(TOGETHER)
        back = {name: value for name, value in self.before.items() if name in asked}
        told = {
            name: say("{name} {value}: back to the recommended value", name=name, value=value)
            for name, value in back.items()
        }
        left = {name: value for name, value in self.before.items() if name not in back}
        return replace(self, **back, why={**self.why, **told}, before=left)
