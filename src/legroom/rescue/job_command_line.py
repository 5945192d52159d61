"""Find settings on a job's command line, rewrite them, add the resume flag; inject Legroom into its Python.

Knows the usual flag names (records/training_flags.py) and those of --flag, in every spelling: ``--x 4``, ``--x=4``,
``-b4``, ``data.batch_size=4``. Under torchrun and accelerate only the script's own words are read.

Injection (`--loader legroom`, `--gpu-limit`, `legroom leak`) puts inject/sitecustomize.py on PYTHONPATH. It misses
children that are not Python or run with -S, -I or -E.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from legroom.errors import UsageError
from legroom.messages import listed, say
from legroom.records import LoaderSettings
from legroom.records.loader_settings import ALIASES
from legroom.records.training_flags import Flag, training_flags

# What a retry may lower. `--flag` also takes the short names batch, workers and prefetch.
SETTINGS = ("batch_size", "accumulation", "num_workers", "prefetch_factor", "pin_memory", "low_memory")
SHORT_NAMES = {full: short for short, full in ALIASES.items()}  # of `--flag`, and in JSON
LOADER = "LEGROOM_LOADER"
_WHOLE = re.compile(r"(?:global|total)[-_]?batch", re.I)


@dataclass(frozen=True, slots=True)
class NamedFlag:
    """A flag given with --flag: ``--flag accumulation=--accum_iter=16``."""

    setting: str
    spelling: str
    value: str | None = None  # the script's default, if it was given


@dataclass(frozen=True, slots=True)
class CommandSettings(LoaderSettings):
    """The settings of a command line, and which of them a retry can change."""

    changeable: frozenset[str] = frozenset()  # those with a flag on the command line or a place in the environment
    batch_is_global: bool = False  # batch_size is for all ranks together and must stay divisible among them
    derives_accumulation: bool = False  # the script also gets the global batch and accumulates by itself
    needs_worker: bool = False  # the command line has a setting that torch refuses without workers
    replaces_loader: bool = False  # torch's DataLoader may be replaced with legroom's


def parse_named(text: str) -> NamedFlag:
    """``batch=--my-batch`` or ``accumulation=--accum_iter=16``."""
    name, _, rest = text.partition("=")
    spelling, equals, value = rest.partition("=")
    name = name.strip().replace("-", "_")
    setting = ALIASES.get(name, name)
    if setting not in SETTINGS or not spelling:
        raise UsageError(
            say("--flag {text!r} is not NAME=FLAG", text=text),
            why=say("NAME must be one of {names}", names=listed(SHORT_NAMES.get(one, one) for one in SETTINGS)),
            fix=(say("for example batch=--my-batch, or accumulation=--accum_iter=16 if 16 is the script's default"),),
        )  # fmt: skip
    return NamedFlag(setting, spelling, value if equals else None)


def find_flags(command: Sequence[str], named: Sequence[NamedFlag] = ()) -> dict[str, Flag]:
    """Each setting's flag on the command line; ``at`` is -1 for a named flag that is not there."""
    all_flags = {ALIASES.get(name, name): flag for name, flag in training_flags(command).items()}
    found = {name: flag for name, flag in all_flags.items() if name in (*SETTINGS, "ranks", "persistent_workers")}
    for one in named:
        found[one.setting] = _find_named(command, one)
    return found


def _find_named(command: Sequence[str], named: NamedFlag) -> Flag:
    for at in range(len(command) - 1, 0, -1):
        word = command[at]
        if word == named.spelling and at + 1 < len(command):
            return Flag(named.spelling, command[at + 1], at)
        if word.startswith(named.spelling + "="):
            return Flag(named.spelling, word[len(named.spelling) + 1 :], at)
    return Flag(named.spelling, named.value or "", -1)


def command_settings(command: Sequence[str], named: Sequence[NamedFlag] = ()) -> CommandSettings:
    """The settings of that command line. A value that is not a number cannot be changed."""
    found = find_flags(command, named)
    numbers = {name: _number(flag.value) for name, flag in found.items()}
    changeable = {name for name in SETTINGS if name in found and (numbers[name] is not None or found[name].at < 0)}
    batch = found.get("batch_size")
    return CommandSettings(
        batch_size=numbers.get("batch_size"),
        accumulation=numbers.get("accumulation"),
        num_workers=numbers.get("num_workers"),
        prefetch_factor=numbers.get("prefetch_factor"),
        pin_memory=_truth(found["pin_memory"].value) if "pin_memory" in found else None,
        low_memory=_truth(found["low_memory"].value) if "low_memory" in found else None,
        changeable=frozenset(changeable | ({"pin_memory", "low_memory"} & found.keys())),
        batch_is_global=batch is not None and _WHOLE.search(batch.spelling) is not None,
        derives_accumulation=_second_batch(command, batch),
        needs_worker=_needs_worker(found),
        ranks=numbers.get("ranks"),
    )


def _needs_worker(found: Mapping[str, Flag]) -> bool:
    """Whether prefetch_factor or persistent_workers is on the command line: torch raises ValueError at 0 workers."""
    prefetch, persistent = found.get("prefetch_factor"), found.get("persistent_workers")
    if prefetch is not None and prefetch.at >= 0 and _number(prefetch.value):
        return True
    return persistent is not None and _truth(persistent.value) is True


def _second_batch(command: Sequence[str], batch: Flag | None) -> bool:
    """Whether the global batch is given beside the micro-batch, as Megatron and DeepSpeed do."""
    if batch is None or batch.at < 0 or _WHOLE.search(batch.spelling):
        return False
    rest = list(command)
    joined = "=" in rest[batch.at]
    del rest[batch.at : batch.at + (1 if joined else 2)]
    other = training_flags(rest).get("batch")
    return other is not None and _WHOLE.search(other.spelling) is not None


def with_settings(command: Sequence[str], settings: LoaderSettings, named: Sequence[NamedFlag] = ()) -> list[str]:
    """The command with these settings. A named flag that is absent is added."""
    words = list(command)
    for name, value in settings.given().items():
        flag = find_flags(words, named).get(name)
        if flag is not None and name in SETTINGS:
            words = _put(words, flag, value)
    return words


def _put(words: list[str], flag: Flag, value: int | bool) -> list[str]:
    if isinstance(value, bool):
        return _put_switch(words, flag, value)
    text = str(value)
    if flag.at < 0:
        return [*words, flag.spelling, text]
    word = words[flag.at]
    if "=" in word:
        head, _, _ = word.rpartition("=" + flag.value)
        words[flag.at] = f"{head}={text}" if head else f"{word.partition('=')[0]}={text}"
    elif re.fullmatch(r"-[A-Za-z]\d+", word):  # -b4
        words[flag.at] = f"{word[:2]}{text}"
    elif flag.at + 1 < len(words):
        words[flag.at + 1] = text
    return words


def _put_switch(words: list[str], flag: Flag, value: bool) -> list[str]:
    """Set a flag that may have no value: ``--pin_memory``, ``--pin_memory true``, ``--no-pin-memory``."""
    if flag.at < 0:
        return [*words, flag.spelling] if value else words
    word = words[flag.at]
    present = _truth(flag.value)
    if "=" in word:
        words[flag.at] = f"{word.partition('=')[0]}={_like(word.partition('=')[2], value)}"
    elif flag.at + 1 < len(words) and _truth(words[flag.at + 1]) is not None:
        words[flag.at + 1] = _like(words[flag.at + 1], value)
    elif present is not value:
        del words[flag.at]  # a flag without a value is turned off by removing it
    return words


def _like(old: str, value: bool) -> str:
    """The value in the spelling of the old one: True, true, yes, on, 1."""
    for yes, no in (("True", "False"), ("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0")):
        if old in (yes, no):
            return yes if value else no
    return "true" if value else "false"


def with_resume(command: Sequence[str], flag: str, path: str) -> list[str]:
    """The command with the flag that resumes from that checkpoint.

    ``--resume`` takes the path as the next word, ``--resume=`` in the same word, ``{}`` anywhere. A flag with a value
    (``--resume auto``) is used unchanged.
    """
    words = list(command)
    parts = shlex.split(flag)
    name = parts[0].partition("=")[0]
    if "{}" in flag:
        new = [part.replace("{}", path) for part in parts]
    elif parts[0].endswith("="):
        new = [parts[0] + path]
    elif len(parts) > 1 or "=" in parts[0]:
        new = parts
    else:
        new = [name, path]
    for at in range(len(words) - 1, 0, -1):
        if words[at].startswith(name + "="):
            return [*words[:at], *new, *words[at + 1 :]]
        if words[at] == name:
            takes = at + 1 < len(words) and not words[at + 1].startswith("-")
            return [*words[:at], *new, *words[at + (2 if takes else 1) :]]
    return [*words, *new]


def _number(text: str) -> int | None:
    return int(text) if re.fullmatch(r"[0-9]+", text, re.A) else None


def _truth(text: str) -> bool | None:
    lowered = text.lower()
    if lowered in ("true", "yes", "on", "1", "y", "t"):
        return True
    return False if lowered in ("false", "no", "off", "0", "n", "f") else None


def with_loader(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment in which torch's DataLoader is replaced with Legroom's."""
    return {**_with_sitecustomize(environment), LOADER: "legroom"}


def loader_replaceable(environment: Mapping[str, str]) -> bool:
    """Whether with_loader changes anything: it is not in use yet, and LEGROOM_DISABLE does not switch it off."""
    from legroom.system.process_control import legroom_disabled  # needed only after a failure

    return environment.get(LOADER) != "legroom" and not legroom_disabled(environment)


def with_gpu_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment in which GPU memory is limited once CUDA starts; raises BadLimit for an invalid amount."""
    from legroom.gpu.set_memory_limit import with_limit  # slow to import, and rarely needed

    return with_limit(_with_sitecustomize(environment), amount)


def with_leak(environment: Mapping[str, str], directory: str) -> dict[str, str]:
    """The environment in which every Python process records the growth of its memory in that directory."""
    from legroom.leak.record_files import DIRECTORY  # rarely needed

    return {**_with_sitecustomize(environment), DIRECTORY: directory}


def _with_sitecustomize(environment: Mapping[str, str]) -> dict[str, str]:
    """PYTHONPATH with our sitecustomize first, then the entries that were there."""
    ours = str(Path(__file__).with_name("inject"))
    source = str(Path(__file__).parents[2])  # where this very legroom is imported from
    old = environment.get("PYTHONPATH", "").split(os.pathsep)
    between = [entry for entry in old if entry and entry not in (ours, source)]
    return {**environment, "PYTHONPATH": os.pathsep.join([ours, *between, source])}
