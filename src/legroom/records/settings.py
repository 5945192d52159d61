"""Settings chosen for a job, with the reason for each.

`override` and `roll_back` keep the effective batch size (batch × accumulation × ranks). LEGROOM_SETTINGS carries
settings to a script in the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from legroom.errors import UsageError
from legroom.records.workload import Measured, Plan
from legroom.words import listed, say

VARIABLE = "LEGROOM_SETTINGS"

_COUNTS = {
    "batch_size": 1,
    "accumulation": 1,
    "ranks": 1,
    "num_workers": 0,
    "prefetch_factor": 1,
    "threads": 1,
}
_SWITCHES = ("persistent_workers", "pin_memory", "low_memory")
_WORDS = {"loader_kind": ("torch", "legroom")}
NAMES = (*_COUNTS, *_SWITCHES, "allocator", *_WORDS)
ALIASES = {
    "workers": "num_workers",
    "prefetch": "prefetch_factor",
    "batch": "batch_size",
    "loader": "loader_kind",
}


def to_environment(settings: Mapping[str, Any]) -> str:
    """The variable's value; what is None is left out, because it says nothing."""
    return json.dumps(checked({name: value for name, value in settings.items() if value is not None}))


def from_environment(environment: Mapping[str, str]) -> dict[str, Any]:
    """The settings that the environment asks for; none where it says nothing."""
    text = environment.get(VARIABLE)
    if not text:
        return {}
    try:
        read = json.loads(text)
    except ValueError as problem:
        raise _bad(say("{name} is no JSON: {why}", name=VARIABLE, why=problem)) from None
    if not isinstance(read, dict):
        raise _bad(say("{name} is no JSON object", name=VARIABLE))
    return checked(read)


def checked(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Settings under their own names, each with a value that it can have."""
    result: dict[str, Any] = {}
    for given, value in settings.items():
        name = ALIASES.get(given, given)
        if name not in NAMES:
            raise _bad(say("no setting is called {name!r}", name=given))
        if not _possible(name, value):
            raise _bad(say("{name} cannot be {value!r}", name=name, value=value))
        result[name] = value
    return result


def read_word(name: str, text: str) -> Any:
    """A value as a command line spells it: ``2``, ``on``, ``expandable_segments:True``."""
    name = ALIASES.get(name, name)
    if name in _COUNTS:
        try:
            return int(text)
        except ValueError:
            return text
    if name in _SWITCHES:
        word = text.lower()
        return (
            True
            if word in ("on", "true", "yes", "1")
            else False
            if word in ("off", "false", "no", "0")
            else text
        )
    return text


def _possible(name: str, value: Any) -> bool:
    if name in _COUNTS:
        return isinstance(value, int) and not isinstance(value, bool) and value >= _COUNTS[name]
    if name in _SWITCHES:
        return isinstance(value, bool)
    return isinstance(value, str) and value in _WORDS.get(name, (value,))


def _bad(what: str) -> UsageError:
    return UsageError(
        what,
        why=say("settings are {names}", names=listed(NAMES)),
        fix=(say("write num_workers=2 on a command line, a JSON object in {name}", name=VARIABLE),),
    )


TOGETHER = ("batch_size", "accumulation")  # one is nothing without the other
_PREFETCH = 2  # torch's own default


def completed(now: Mapping[str, Any], by_hand: Mapping[str, Any]) -> dict[str, Any]:
    """``by_hand`` with what follows from it; an error where the effective batch would change."""
    wanted = dict(by_hand)
    if wanted.get("ranks", now["ranks"]) != now["ranks"]:
        raise UsageError(
            say(
                "{ranks} ranks set by hand, {found} in the request", ranks=wanted["ranks"], found=now["ranks"]
            ),
            why=say("the effective batch depends on it"),
            fix=(say("give the number of ranks as such, not as an override"),),
        )
    step = now["batch_size"] * now["accumulation"]
    for given, other in (TOGETHER, TOGETHER[::-1]):
        if given in wanted and other not in wanted and step % wanted[given] == 0:
            wanted[other] = step // wanted[given]
    batch, times = (wanted.get(name, now[name]) for name in TOGETHER)
    if batch * times != step:
        old, new = (samples * now["ranks"] for samples in (step, batch * times))
        raise UsageError(
            say("batch {batch} × accumulation {times} would change the effective batch", batch=batch, times=times),
            why=say(
                "{batch} × {times} × {ranks} ranks = {new}, and {old} was asked for",
                batch=batch, times=times, ranks=now["ranks"], new=new, old=old,
            ),
            fix=(say("ask for an effective batch of {new} if that is meant", new=new),),
        )  # fmt: skip
    if wanted.get("num_workers", now["num_workers"]) == 0:
        wanted.pop("prefetch_factor", None)
    elif wanted.get("prefetch_factor", now["prefetch_factor"]) is None:
        wanted["prefetch_factor"] = _PREFETCH
    return wanted


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
