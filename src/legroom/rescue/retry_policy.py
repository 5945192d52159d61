"""Choose what to lower for the next attempt: a pure function of the verdict and the settings.

    prefetch_factor -> num_workers -> low-memory data -> micro-batch down and accumulation up -> legroom.DataLoader

Cheapest first: prefetch and workers cost at most speed, low-memory data costs disk reads, a smaller micro-batch costs
GPU speed. Each step changes one thing, so that the report shows which change helped, and keeps the effective batch.
Settings that cannot help are not changed: workers use no GPU memory. If the training process itself was OOM-killed
or failed to allocate, prefetch and workers come last. torch refuses no combination: prefetch_factor and
persistent_workers need a worker. The loader is replaced only after shm-full, when no setting is left.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from legroom.messages import say
from legroom.records import LoaderSettings
from legroom.records.failure import Cause, Verdict
from legroom.rescue.job_command_line import CommandSettings

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
    killed = cause == "ram-oom-kill" and verdict.victim is not None and verdict.victim.role == "main"
    trainer = killed or (cause == "ram-allocation" and verdict.refused == "main")
    step = _first_that_works(cause, settings, descriptors_raised, trainer=trainer)
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
    for setting in _TRAINER_KILLED if trainer else _ORDER[cause]:
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
    """Divide the micro-batch by its smallest divisor and multiply accumulation by it."""
    batch = settings.batch_size
    if "batch_size" not in settings.changeable or batch is None or batch < 2:
        return None
    if "accumulation" not in settings.changeable and not settings.derives_accumulation:
        return None
    ranks = settings.ranks or 1
    divisible = settings.batch_is_global and batch % ranks == 0
    share = batch // ranks if divisible else batch
    if share < 2:
        return None
    factor = next(number for number in range(2, share + 1) if share % number == 0)
    new = batch // factor
    if settings.derives_accumulation:
        why = say("batch_size {old} → {new}: the script keeps the effective batch itself", old=batch, new=new)
        return _step(why, batch_size=new)
    old_steps = settings.accumulation or 1
    steps = old_steps * factor
    why = say(
        "batch_size {old} → {new}, accumulation {old_steps} → {steps}: the effective batch stays {whole}",
        old=batch, new=new, old_steps=old_steps, steps=steps, whole=batch * old_steps,
    )  # fmt: skip
    if settings.accumulation is None:
        why = say("{why} (accumulation was not given; assuming 1)", why=why)
    return _step(why, batch_size=new, accumulation=steps)


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
        return say("cause unknown, and the most likely one is not a memory pool that ran out")
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
    if not settings.changeable:
        return say(
            "no setting was recognized on the command line. Name the script's flags: --flag "
            "batch=--ITS-FLAG --flag workers=--ITS-FLAG"
        )
    return say("nothing is left to lower")
