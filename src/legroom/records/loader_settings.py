"""DataLoader settings: one record with torch's argument names, from the command line to the retry policy.

LoaderSettings holds any of them, narrower records are its subclasses. LEGROOM_SETTINGS carries settings to a script in
the environment.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from legroom.errors import UsageError
from legroom.messages import listed, say
from legroom.system.argument_checks import check_choice, check_integer

VARIABLE = "LEGROOM_SETTINGS"
LoaderKind = Literal["torch", "legroom"]  # whose DataLoader


@dataclass(frozen=True, slots=True)
class LoaderSettings:
    """Settings of a DataLoader and of the training loop around it. None: not given."""

    batch_size: int | None = None  # samples per batch on one rank
    accumulation: int | None = None  # batches per optimizer step
    ranks: int | None = None  # processes that train together
    num_workers: int | None = None
    prefetch_factor: int | None = None
    persistent_workers: bool | None = None
    pin_memory: bool | None = None
    low_memory: bool | None = None  # stream or map the data instead of holding them in each process
    threads: int | None = None  # OMP_NUM_THREADS, MKL_NUM_THREADS
    allocator: str | None = None  # PYTORCH_CUDA_ALLOC_CONF
    loader_kind: LoaderKind | None = None

    def values(self) -> dict[str, Any]:
        """All settings by name."""
        return {name: getattr(self, name) for name in NAMES}

    def given(self) -> dict[str, Any]:
        """The settings that are not None."""
        return {name: value for name, value in self.values().items() if value is not None}

    def changed(self, other: LoaderSettings) -> LoaderSettings:
        """These settings with those that ``other`` gives."""
        return replace(self, **other.given())


NAMES = tuple(one.name for one in fields(LoaderSettings))


@dataclass(frozen=True, slots=True)
class CompleteLoaderSettings(LoaderSettings):
    """Settings of a DataLoader of which none is open: torch's default where none was given."""

    batch_size: int = 1
    ranks: int = 1
    num_workers: int = 0
    prefetch_factor: int = 2
    persistent_workers: bool = False
    pin_memory: bool = False
    loader_kind: LoaderKind = "torch"


@dataclass(frozen=True, slots=True)
class SafeSettings(LoaderSettings):
    """DataLoader settings that fit in the machine's free memory now, up to a batch size in bytes."""

    num_workers: int = 0
    pin_memory: bool = False
    persistent_workers: bool = False
    max_batch_bytes: int | None = None  # None: no limit
    bound_by: str = "none"  # the memory pool that limits it
    why: str = ""
    pin_why: str = ""

    def as_object(self) -> dict[str, Any]:
        """The settings for JSON: only those that are chosen here."""
        return {name: getattr(self, name) for name in _SAFE}


_SAFE = (
    "num_workers", "prefetch_factor", "pin_memory", "persistent_workers", "max_batch_bytes", "bound_by", "why",
    "pin_why",
)  # fmt: skip


_COUNTS = {"batch_size": 1, "accumulation": 1, "ranks": 1, "num_workers": 0, "prefetch_factor": 1, "threads": 1}
_SWITCHES = ("persistent_workers", "pin_memory", "low_memory")
_SWITCH_WORDS = {**dict.fromkeys(("on", "true", "yes", "1"), True), **dict.fromkeys(("off", "false", "no", "0"), False)}
_CHOICES = {"loader_kind": ("torch", "legroom")}
ALIASES = {"workers": "num_workers", "prefetch": "prefetch_factor", "batch": "batch_size", "loader": "loader_kind"}


def to_environment(settings: LoaderSettings) -> str:
    """The settings as the value of LEGROOM_SETTINGS."""
    return json.dumps(settings.given())


def from_environment(environment: Mapping[str, str]) -> LoaderSettings:
    """The settings given in LEGROOM_SETTINGS."""
    text = environment.get(VARIABLE)
    if not text:
        return LoaderSettings()
    try:
        read = json.loads(text)
    except ValueError as problem:
        raise _bad(say("{name} is not JSON: {why}", name=VARIABLE, why=problem)) from None
    if not isinstance(read, dict):
        raise _bad(say("{name} is not a JSON object", name=VARIABLE))
    return read_settings(read)


def read_settings(values: Mapping[str, Any]) -> LoaderSettings:
    """Settings from names, also short ones, and values; UsageError for a name or value that is not valid."""
    found: dict[str, Any] = {}
    for given, value in values.items():
        name = ALIASES.get(given, given)
        if name not in NAMES:
            raise _bad(say("unknown setting {name!r}", name=given))
        found[name] = _checked(name, value)
    return LoaderSettings(**found)


def _checked(name: str, value: Any) -> Any:
    if name in _COUNTS:
        return check_integer(name, value, _COUNTS[name])
    if name in _CHOICES:
        check_choice(name, value, _CHOICES[name])
    elif not isinstance(value, bool if name in _SWITCHES else str):
        raise _bad(say("{value!r} is not a valid value for {name}", name=name, value=value))
    return value


def read_word(name: str, text: str) -> Any:
    """A value from a command line: ``2``, ``on``, ``expandable_segments:True``."""
    name = ALIASES.get(name, name)
    if name in _COUNTS:
        try:
            return int(text)
        except ValueError:
            return text
    if name in _SWITCHES:
        return _SWITCH_WORDS.get(text.lower(), text)
    return text


def _bad(what: str) -> UsageError:
    return UsageError(
        what,
        why=say("settings: {names}", names=listed(NAMES)),
        fix=(say("write num_workers=2 on a command line, a JSON object in {name}", name=VARIABLE),),
    )
