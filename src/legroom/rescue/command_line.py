"""Find settings on a job's command line, rewrite them, add the resume flag; inject Legroom into its Python.

Knows the usual flag names (probe.training_flags) and those given with --flag, in every spelling: ``--x 4``, ``--x=4``,
``-b4``, ``data.batch_size=4``. Under torchrun and accelerate only the script's own words are read.

Injection (`--loader legroom`, `--gpu-limit`) puts inject/sitecustomize.py on PYTHONPATH. It misses children that
are not Python or run with -S, -I or -E.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from legroom.errors import UsageError
from legroom.probe.training_flags import Flag, flags
from legroom.words import listed, say

# What the policy may change; the names are those of `--flag NAME=--spelling`.
SETTINGS = ("batch", "accumulation", "workers", "prefetch", "pin_memory", "low_memory")


LOADER = "LEGROOM_LOADER"

_WHOLE = re.compile(r"(?:global|total)[-_]?batch", re.I)


@dataclass(frozen=True, slots=True)
class NamedFlag:
    """A flag that the person named: ``--flag accumulation=--accum_iter=16``."""

    lever: str
    spelling: str
    value: str | None = None  # what the script uses when the flag is not given, where the person said so


@dataclass(frozen=True, slots=True)
class CommandSettings:
    """The settings of a command line that can be changed, with their present values."""

    batch: int | None = None
    accumulation: int | None = None
    workers: int | None = None
    prefetch: int | None = None
    pin_memory: bool | None = None
    low_memory: bool | None = None
    can: frozenset[str] = frozenset()  # those that have a place on the command line, or in the environment
    batch_of_all: bool = False  # the batch is all ranks' together: it must stay divisible among them
    derives_accumulation: bool = False  # the script is told the whole batch too, and accumulates by itself
    ranks: int | None = None


def parse_named(text: str) -> NamedFlag:
    """``batch=--my-batch`` or ``accumulation=--accum_iter=16``."""
    lever, _, rest = text.partition("=")
    spelling, equals, value = rest.partition("=")
    lever = lever.strip().replace("-", "_")
    if lever not in SETTINGS or not spelling:
        raise UsageError(
            say("cannot read {text!r} as a flag's name", text=text),
            why=say("it is NAME=FLAG with NAME one of {names}", names=listed(SETTINGS)),
            fix=(say("write it like batch=--my-batch, or accumulation=--accum_iter=16 where 16 is its default"),),
        )  # fmt: skip
    return NamedFlag(lever, spelling, value if equals else None)


def find_flags(command: Sequence[str], named: Sequence[NamedFlag] = ()) -> dict[str, Flag]:
    """Where each lever stands on the command line; ``at`` is -1 for a named flag that is not there."""
    found = {name: flag for name, flag in flags(command).items() if name in SETTINGS or name == "ranks"}
    for one in named:
        found[one.lever] = _find_named(command, one)
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
    """The settings of that command line, as numbers; what is no number cannot be changed."""
    found = find_flags(command, named)
    numbers = {name: _number(flag.value) for name, flag in found.items()}
    can = {name for name in SETTINGS if name in found and (numbers[name] is not None or found[name].at < 0)}
    if "pin_memory" in found:
        can.add("pin_memory")
    batch = found.get("batch")
    return CommandSettings(
        batch=numbers.get("batch"),
        accumulation=numbers.get("accumulation"),
        workers=numbers.get("workers"),
        prefetch=numbers.get("prefetch"),
        pin_memory=_truth(found["pin_memory"].value) if "pin_memory" in found else None,
        low_memory=_truth(found["low_memory"].value) if "low_memory" in found else None,
        can=frozenset(can | ({"low_memory"} & found.keys())),
        batch_of_all=batch is not None and _WHOLE.search(batch.spelling) is not None,
        derives_accumulation=_second_batch(command, batch),
        ranks=numbers.get("ranks"),
    )


def _second_batch(command: Sequence[str], batch: Flag | None) -> bool:
    """Whether beside the batch of one process that of all is given (Megatron's, DeepSpeed's way)."""
    if batch is None or batch.at < 0 or _WHOLE.search(batch.spelling):
        return False
    rest = list(command)
    joined = "=" in rest[batch.at]
    del rest[batch.at : batch.at + (1 if joined else 2)]
    other = flags(rest).get("batch")
    return other is not None and _WHOLE.search(other.spelling) is not None


def with_settings(
    command: Sequence[str], values: Mapping[str, int | bool], named: Sequence[NamedFlag] = ()
) -> list[str]:
    """The command with these values in the places of the old ones; a named flag that was absent is added."""
    words = list(command)
    for name, value in values.items():
        flag = find_flags(words, named).get(name)
        if flag is None:
            continue
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
    """A flag that may stand alone: ``--pin_memory``, ``--pin_memory true``, ``--no-pin-memory``."""
    if flag.at < 0:
        return [*words, flag.spelling] if value else words
    word = words[flag.at]
    said = _truth(flag.value)
    if "=" in word:
        words[flag.at] = f"{word.partition('=')[0]}={_like(word.partition('=')[2], value)}"
    elif flag.at + 1 < len(words) and _truth(words[flag.at + 1]) is not None:
        words[flag.at + 1] = _like(words[flag.at + 1], value)
    elif said is not value:
        del words[flag.at]  # a bare switch is turned off by leaving it out
    return words


def _like(old: str, value: bool) -> str:
    """The value in the old one's way of writing."""
    for yes, no in (("True", "False"), ("true", "false"), ("yes", "no"), ("on", "off"), ("1", "0")):
        if old in (yes, no):
            return yes if value else no
    return "true" if value else "false"


def with_resume(command: Sequence[str], flag: str, path: str) -> list[str]:
    """The command resuming from that checkpoint.

    ``--resume`` takes the path as its next word, ``--resume=`` in the same one, ``{}`` stands for it anywhere, and a
    flag with a value of its own (``--resume auto``) is taken as it is.
    """
    import shlex

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
    """The environment in which torch's DataLoader is replaced with ours."""
    return {**_with_sitecustomize(environment), LOADER: "legroom"}


def with_gpu_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment in which a child's card is limited once it starts CUDA; BadLimit for what makes no sense."""
    from legroom.gpu.memory_limit import with_limit  # only those who ask for it pay for the import

    return with_limit(_with_sitecustomize(environment), amount)


def _with_sitecustomize(environment: Mapping[str, str]) -> dict[str, str]:
    """With our sitecustomize in front; a PYTHONPATH that was there stays behind it."""
    ours = str(Path(__file__).with_name("inject"))
    source = str(Path(__file__).parents[2])  # where this very legroom is imported from
    old = environment.get("PYTHONPATH", "").split(os.pathsep)
    between = [entry for entry in old if entry and entry not in (ours, source)]
    return {**environment, "PYTHONPATH": os.pathsep.join([ours, *between, source])}
