"""The settings that a retry changes: find them on a job's command line, choose what to lower, rewrite them. Pure.

Knows the usual flag names (records/loader_settings_and_flags.py) and those of --flag, in every spelling: ``--x 4``,
``--x=4``, ``-b4``, ``data.batch_size=4``. Under torchrun and accelerate only the script's own words are read.

What is lowered after a failure, one step at a time:

    prefetch_factor -> num_workers -> low-memory data -> micro-batch down and accumulation up -> legroom.DataLoader

Cheapest first: prefetch and workers cost at most speed, low-memory data costs disk reads, a smaller micro-batch costs
GPU speed. Each step changes one thing, so that the report shows which change helped, and keeps the effective batch.
Settings that cannot help are not changed: workers use no GPU memory. If the training process itself was OOM-killed
or failed to allocate, prefetch and workers come last. So they do where no worker process was seen: a number of workers
may be one of threads. torch refuses no combination: prefetch_factor and persistent_workers need a worker. The loader
is replaced only after shm-full, when no setting is left; first, where settings reach no flag of the script.

`within_limits` derives the settings of a later run from what an earlier run of the same command had to lower.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from legroom.errors import UsageError
from legroom.messages import listed, say
from legroom.records.failure import Cause, Verdict
from legroom.records.loader_settings_and_flags import ALIASES, Flag, LoaderSettings, training_flags
from legroom.system.argument_checks import check_integer

# What a retry may lower. `--flag` also takes the short names batch, workers and prefetch.
SETTINGS = ("batch_size", "accumulation", "num_workers", "prefetch_factor", "pin_memory", "low_memory")
SHORT_NAMES = {full: short for short, full in ALIASES.items()}  # of `--flag`, and in JSON
_SWITCHES = ("pin_memory", "low_memory")
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
    only_environment: bool = False  # no flag was recognized: changes reach only a script that calls legroom.tune


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
    if equals and setting not in _SWITCHES and _number(value) is None:
        check_integer(f"--flag {name}", value, 1)  # raises; a default that is ignored would be no less wrong
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
        word, following = command[at], command[at + 1] if at + 1 < len(command) else None
        if word == named.spelling and named.setting in _SWITCHES and _truth(following or "") is None:
            return Flag(named.spelling, "false" if re.match(r"-*no[-_]", word) else "true", at)  # it has no value
        if word == named.spelling and following is not None:
            return Flag(named.spelling, following, at)
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


# Which settings help against which cause, in the order they are lowered.
_ORDER: dict[Cause, tuple[str, ...]] = {
    "shm-full": ("prefetch_factor", "num_workers", "batch_size", "loader_kind"),
    "ram-oom-kill": ("prefetch_factor", "num_workers", "low_memory", "batch_size"),
    "ram-allocation": ("prefetch_factor", "num_workers", "low_memory", "batch_size"),
    "swap-thrash": ("prefetch_factor", "num_workers", "low_memory", "batch_size"),
    "pinned-exhausted": ("pin_memory", "prefetch_factor", "num_workers", "batch_size"),
    "gpu-oom": ("batch_size",),
    "fds-exhausted": ("descriptors", "prefetch_factor", "num_workers"),
    "processes-exhausted": ("num_workers",),
    "map-count": ("prefetch_factor", "num_workers", "batch_size"),
}
_TRAINER_KILLED = ("low_memory", "batch_size", "prefetch_factor", "num_workers")


@dataclass(frozen=True, slots=True)
class RetryStep:
    """The next attempt's settings, or why there is no next attempt."""

    why: str
    changes: LoaderSettings = field(default_factory=LoaderSettings)
    stop: bool = False
    raise_descriptors: bool = False
    undo: LoaderSettings | None = None  # the last change, to be taken back first


def next_step(
    verdict: Verdict,
    settings: CommandSettings,
    *,
    descriptors_raised: bool = False,
    repeated: bool = False,
    last_change: str | None = None,
) -> RetryStep:
    """What to change after that failure.

    ``repeated``: it was already retried once unchanged. ``last_change``: the change made before the failed attempt.
    """
    if verdict.cause == "worker-killed" and not repeated:
        return RetryStep(say("no sign that memory ran out: retrying with the same settings"))
    if verdict.cause == "not-memory" and last_change is not None:
        return _stop(say("the last change ({change}) may have caused this error", change=last_change))
    cause = verdict.cause
    if cause == "unknown" and verdict.likely:
        cause = verdict.likely[0].cause
    if cause not in _ORDER:
        return _stop(_why_nothing_helps(verdict.cause))
    # Of threads, where the script was given a number: they are tried when nothing else is left.
    last = frozenset(name for name in settings.changeable & verdict.of_threads if getattr(settings, name) is not None)
    useless = settings.changeable & (verdict.without_effect | (verdict.of_threads - last))
    settings = replace(settings, changeable=settings.changeable - useless)
    killed = cause == "ram-oom-kill" and verdict.victim is not None and verdict.victim.role == "main"
    trainer = killed or (cause == "ram-allocation" and verdict.refused == "main")
    others = replace(settings, changeable=settings.changeable - last)
    step = _first_that_works(cause, others, descriptors_raised, trainer=trainer)
    if last and step.stop:
        lower = next((one for name in ("prefetch_factor", "num_workers") if (one := _lower(name, settings))), None)
        if lower is not None:
            why = say("{why} (no worker processes were seen: this helps only if it sets threads)", why=lower.why)
            step = replace(lower, why=why)
    if step.stop and useless and not settings.changeable:
        names = listed(SHORT_NAMES.get(name, name) for name in sorted(useless))
        return _stop(say("{names} had no influence on what ran out, and no other setting can be lowered", names=names))
    if verdict.cause == "unknown" and not step.stop:
        return replace(step, why=say("cause unknown, most likely {cause}; {why}", cause=cause, why=step.why))
    return step


def step_without(change: LoaderSettings, why: str, failure: Verdict, settings: CommandSettings) -> RetryStep:
    """Take back a change after which the job failed with another error, and lower something else.

    ``failure`` is what the change was made for; ``settings`` are those before it.
    """
    step = next_step(failure, settings_without(settings, change))
    if step.stop or not step.changes.given():
        return _stop(say("the last change ({change}) may have caused this error", change=why))
    told = say("{why} (undone: {change}, which may have caused the error)", why=step.why, change=why)
    return replace(step, why=told, undo=change)


def settings_without(settings: CommandSettings, change: LoaderSettings) -> CommandSettings:
    """The settings that can be changed, without those that the job refused."""
    if change.num_workers == 0 and not settings.needs_worker:
        return replace(settings, needs_worker=True)
    names = change.given()
    return replace(
        settings,
        changeable=settings.changeable - frozenset(names),
        replaces_loader=settings.replaces_loader and "loader_kind" not in names,
    )


def _first_that_works(cause: Cause, settings: CommandSettings, descriptors_raised: bool, *, trainer: bool) -> RetryStep:
    order = _TRAINER_KILLED if trainer else _ORDER[cause]
    if settings.only_environment:  # most scripts read no setting there, and each step is a whole run
        order = tuple(sorted(order, key=lambda name: name != "loader_kind"))
    for setting in order:
        if setting == "descriptors":
            if not descriptors_raised:
                why = say("raising the open-file soft limit to the hard limit")
                return RetryStep(why, raise_descriptors=True)
            continue
        step = _lower(setting, settings)
        if step is not None and trainer:
            why = say("{why} (the training process ran out of memory, not a worker)", why=step.why)
            return replace(step, why=why)
        if step is not None:
            return step
    return _stop(_nothing_left(cause, settings))


def _lower(setting: str, settings: CommandSettings) -> RetryStep | None:
    if setting == "batch_size":
        return _lower_batch(settings)
    if setting == "loader_kind":
        return _replace_loader(settings)
    if setting not in settings.changeable:
        return None
    if setting == "prefetch_factor":
        return _lower_prefetch(settings)
    if setting == "num_workers":
        return _lower_workers(settings)
    if setting == "pin_memory" and settings.pin_memory is not False:
        return _step(say("pin_memory → off: use no page-locked memory"), pin_memory=False)
    if setting == "low_memory" and not settings.low_memory:
        return _step(
            say("low_memory → on: read data on demand instead of keeping a copy in each process"), low_memory=True
        )
    return None


def _lower_prefetch(settings: CommandSettings) -> RetryStep | None:
    old = settings.prefetch_factor
    if settings.num_workers == 0 or old == 1:
        return None
    why = say("prefetch_factor {old} → 1: fewer batches wait in memory", old=old if old is not None else say("unset"))
    return _step(why, prefetch_factor=1)


def _lower_workers(settings: CommandSettings) -> RetryStep | None:
    old, least = settings.num_workers, 1 if settings.needs_worker else 0
    if old is not None and old <= least:
        return None
    # Half, then none: without workers nothing passes through shared memory.
    new = max(least, old // 2 if old is not None and old >= 4 else 0)
    why = say("num_workers {old} → {new}", old=old if old is not None else say("unset"), new=new)
    return _step(why, num_workers=new)


def _replace_loader(settings: CommandSettings) -> RetryStep | None:
    if not settings.replaces_loader:
        return None
    why = say("torch's DataLoader → legroom.DataLoader: its batches do not use /dev/shm")
    return _step(why, loader_kind="legroom")


def _lower_batch(settings: CommandSettings) -> RetryStep | None:
    if settings.batch_size is None:
        return None
    changes = _smaller_batch(settings, settings.batch_size - 1)
    return None if changes is None else RetryStep(_batch_change(settings, changes), changes)


def _smaller_batch(settings: CommandSettings, most: int) -> LoaderSettings | None:
    """Divide the micro-batch by its smallest divisor that brings it to ``most``; multiply accumulation by it."""
    batch = settings.batch_size
    if "batch_size" not in settings.changeable or batch is None:
        return None
    if "accumulation" not in settings.changeable and not settings.derives_accumulation:
        return None
    ranks = settings.ranks or 1
    divisible = settings.batch_is_global and batch % ranks == 0
    share = batch // ranks if divisible else batch
    factors = (number for number in range(2, share + 1) if share % number == 0 and batch // number <= most)
    factor = next(factors, None)
    if factor is None:
        return None
    if settings.derives_accumulation:
        return LoaderSettings(batch_size=batch // factor)
    return LoaderSettings(batch_size=batch // factor, accumulation=(settings.accumulation or 1) * factor)


def _batch_change(settings: CommandSettings, changes: LoaderSettings) -> str:
    batch, new = settings.batch_size, changes.batch_size
    if changes.accumulation is None or batch is None:
        return say("batch_size {old} → {new}: the script keeps the effective batch itself", old=batch, new=new)
    old_steps = settings.accumulation or 1
    why = say(
        "batch_size {old} → {new}, accumulation {old_steps} → {steps}: the effective batch stays {whole}",
        old=batch, new=new, old_steps=old_steps, steps=changes.accumulation, whole=batch * old_steps,
    )  # fmt: skip
    if settings.accumulation is None:
        why = say("{why} (accumulation was not given; assuming 1)", why=why)
    return why


def within_limits(asked: CommandSettings, limits: LoaderSettings, asked_then: LoaderSettings) -> LoaderSettings:
    """What to change in the settings asked for now: no value rises, and the effective batch is the one asked for now.

    ``limits`` are the settings that an earlier run had to lower, with the values that worked; ``asked_then`` is what
    that run was asked for. A batch smaller than the one of that run may fit with more workers: it starts as given.
    So does a batch that would fall below half of its limit, as 11 does with a limit of 8: whether it fits is unknown.
    """
    batch_then = limits.batch_size or asked_then.batch_size
    if asked.batch_size is not None and batch_then is not None and asked.batch_size < batch_then:
        return LoaderSettings()
    changes: dict[str, Any] = {}
    if limits.batch_size is not None and asked.batch_size is not None and asked.batch_size > limits.batch_size:
        smaller = _smaller_batch(asked, limits.batch_size)
        if smaller is not None and smaller.batch_size is not None and 2 * smaller.batch_size >= limits.batch_size:
            changes = smaller.given()
    least = {"num_workers": 1 if asked.needs_worker else 0, "prefetch_factor": 1}
    for name in least if asked.num_workers != 0 else ():
        limit, now, then = (getattr(one, name) for one in (limits, asked, asked_then))
        if limit is None or name not in asked.changeable:
            continue
        limit = max(limit, least[name])
        # Not given, the script's default counts. It is unknown, but the limit is below it if it was not given then.
        if then is None if now is None else limit < now:
            changes[name] = limit
    for name, lower in (("pin_memory", False), ("low_memory", True)):
        if getattr(limits, name) is lower and name in asked.changeable and getattr(asked, name) is not lower:
            changes[name] = lower
    if limits.loader_kind == "legroom" and asked.replaces_loader:
        changes["loader_kind"] = "legroom"
    return LoaderSettings(**changes)


def lowered_in_environment(given: LoaderSettings, lowered: LoaderSettings) -> LoaderSettings:
    """LEGROOM_SETTINGS for an attempt: the user's with what a restart lowered; no value and no effective batch rises.

    A batch in LEGROOM_SETTINGS stays: a restart lowers the batch of the command line, which can be another one.
    """
    changes = lowered.given()
    if given.batch_size is not None or given.accumulation is not None:
        changes = {name: value for name, value in changes.items() if name not in ("batch_size", "accumulation")}
    for name in ("num_workers", "prefetch_factor"):
        if name in changes and getattr(given, name) is not None:
            changes[name] = min(changes[name], getattr(given, name))
    return given.changed(LoaderSettings(**changes))


def describe_changes(asked: CommandSettings, changes: LoaderSettings) -> str:
    """The changes in one line: ``num_workers 4 → 0, batch_size 16 → 8, accumulation 1 → 2: …``."""
    shown = []
    for name, value in changes.given().items():
        old = getattr(asked, name)
        if name == "loader_kind":
            shown.append(f"loader {value}")
        elif name in _SWITCHES:
            shown.append(f"{name} {say('on') if value else say('off')}")
        elif name not in ("batch_size", "accumulation"):
            shown.append(f"{name} {say('unset') if old is None else old} → {value}")
    if changes.batch_size is not None:
        shown.append(_batch_change(asked, changes))
    return listed(shown)


def _step(why: str, **changes: Any) -> RetryStep:
    return RetryStep(why, LoaderSettings(**changes))


def _stop(why: str) -> RetryStep:
    return RetryStep(why, stop=True)


def _why_nothing_helps(cause: Cause) -> str:
    if cause == "disk-full":
        return say("no setting frees disk space")
    if cause == "tmpdir-too-long":
        return say("no setting shortens the temporary directory path")
    if cause == "worker-killed":
        return say("a worker was killed again, with no sign that memory ran out")
    if cause == "unknown":
        return say("cause unknown, and the most likely one is not a resource that ran out")
    return say("memory was not the cause: lower settings would not help")


def _nothing_left(cause: Cause, settings: CommandSettings) -> str:
    if (
        settings.batch_size is not None
        and settings.batch_size > 1
        and "accumulation" not in settings.changeable
        and not settings.derives_accumulation
    ):
        return say(
            "batch_size {batch} could be lowered, but no accumulation flag is known that keeps the effective "
"batch. Name it with --flag accumulation=--ITS-FLAG",
            batch=settings.batch_size,
        )  # fmt: skip
    if settings.batch_size is None and "batch_size" in _ORDER[cause]:
        return say(
            "nothing else is left to lower, and no batch size was recognized on the command line. If the script has "
            "flags, name them and their values: --flag batch=--ITS-FLAG=16 --flag accumulation=--ITS-FLAG=1"
        )
    return say("nothing is left to lower")
