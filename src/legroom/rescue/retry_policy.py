"""Choose what to lower for the next attempt: a pure function of the verdict and the settings.

    prefetch_factor -> num_workers -> low-memory data -> micro-batch down and accumulation up

Cheapest first: prefetch and workers cost at most speed, low-memory data costs disk reads, a smaller micro-batch costs
GPU speed. Each step changes one thing, so that the report shows which change helped, and keeps the effective batch.
Settings that cannot help are not changed: workers use no GPU memory. If the training process itself was OOM-killed
or failed to allocate, prefetch and workers come last.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from legroom.model.death import Cause, Verdict
from legroom.rescue.command_line import CommandSettings
from legroom.words import say

# Which levers work against which cause, in the order they are pulled.
_ORDER: dict[Cause, tuple[str, ...]] = {
    "shm-full": ("prefetch", "workers", "batch"),
    "ram-oom-kill": ("prefetch", "workers", "low_memory", "batch"),
    "ram-allocation": ("prefetch", "workers", "low_memory", "batch"),
    "swap-thrash": ("prefetch", "workers", "low_memory", "batch"),
    "pinned-exhausted": ("pin_memory", "prefetch", "workers", "batch"),
    "gpu-oom": ("batch",),
    "fds-exhausted": ("descriptors", "prefetch", "workers"),
    "processes-exhausted": ("workers",),
    "map-count": ("prefetch", "workers", "batch"),
}
_TRAINER_KILLED = ("low_memory", "batch", "prefetch", "workers")


@dataclass(frozen=True, slots=True)
class RetryStep:
    """The next attempt's settings, or why there is none."""

    knobs: CommandSettings
    values: Mapping[str, int | bool]  # what changes
    why: str
    stop: bool = False
    raise_descriptors: bool = False


def next_step(
    verdict: Verdict, knobs: CommandSettings, *, descriptors_raised: bool = False, repeated: bool = False
) -> RetryStep:
    """What to change after that death. ``repeated``: it was already started once again unchanged."""
    if verdict.cause == "worker-killed" and not repeated:
        return RetryStep(
            knobs, {}, say("nothing shows that memory was short: once more with the same settings")
        )
    cause = verdict.cause
    if cause == "unknown" and verdict.likely:
        cause = verdict.likely[0].cause
    if cause not in _ORDER:
        return _stop(knobs, _why_nothing_helps(verdict.cause))
    killed = cause == "ram-oom-kill" and verdict.victim is not None and verdict.victim.role == "main"
    trainer = killed or (cause == "ram-allocation" and verdict.refused == "main")
    step = _first_that_works(cause, knobs, descriptors_raised, trainer=trainer)
    if verdict.cause == "unknown" and not step.stop:
        return replace(
            step, why=say("the cause is not known, most likely {cause}; {why}", cause=cause, why=step.why)
        )
    return step


def _first_that_works(
    cause: Cause, knobs: CommandSettings, descriptors_raised: bool, *, trainer: bool
) -> RetryStep:
    for lever in _TRAINER_KILLED if trainer else _ORDER[cause]:
        if lever == "descriptors":
            if not descriptors_raised:
                why = say("open files: the soft limit is raised to the hard one")
                return RetryStep(knobs, {}, why, raise_descriptors=True)
            continue
        step = _lower(lever, knobs)
        if step is not None and trainer:
            why = say("{why} (the training process ran out of memory, not a worker)", why=step.why)
            return replace(step, why=why)
        if step is not None:
            return step
    return _stop(knobs, _nothing_left(cause, knobs))


def _lower(lever: str, knobs: CommandSettings) -> RetryStep | None:
    if lever == "batch":
        return _smaller_batch(knobs)
    if lever not in knobs.can:
        return None
    if lever == "prefetch":
        return _prefetch(knobs)
    if lever == "workers":
        return _workers(knobs)
    if lever == "pin_memory" and knobs.pin_memory is not False:
        return _step(knobs, say("pin_memory off: page-locked memory is not needed"), pin_memory=False)
    if lever == "low_memory" and not knobs.low_memory:
        return _step(
            knobs,
            say("low-memory data: read as it is needed instead of held in each process"),
            low_memory=True,
        )
    return None


def _prefetch(knobs: CommandSettings) -> RetryStep | None:
    old = knobs.prefetch
    if knobs.workers == 0 or old == 1:
        return None
    why = say(
        "prefetch {old} → 1: fewer batches wait in memory", old=old if old is not None else say("unset")
    )
    return _step(knobs, why, prefetch=1)


def _workers(knobs: CommandSettings) -> RetryStep | None:
    old = knobs.workers
    if old == 0:
        return None
    # Half, then none: with none nothing passes through shared memory, and no worker holds anything.
    new = old // 2 if old is not None and old >= 4 else 0
    why = say("workers {old} → {new}", old=old if old is not None else say("unset"), new=new)
    return _step(knobs, why, workers=new)


def _smaller_batch(knobs: CommandSettings) -> RetryStep | None:
    """The micro-batch down by its smallest divisor, and accumulation up by the same."""
    batch = knobs.batch
    if "batch" not in knobs.can or batch is None or batch < 2:
        return None
    if "accumulation" not in knobs.can and not knobs.derives_accumulation:
        return None
    ranks = knobs.ranks or 1
    divisible = knobs.batch_of_all and batch % ranks == 0
    share = batch // ranks if divisible else batch
    if share < 2:
        return None
    factor = next(number for number in range(2, share + 1) if share % number == 0)
    new = batch // factor
    if knobs.derives_accumulation:
        why = say("batch {old} → {new}: the script keeps the whole batch by itself", old=batch, new=new)
        return _step(knobs, why, batch=new)
    old_steps = knobs.accumulation or 1
    steps = old_steps * factor
    why = say(
        "batch {old} → {new}, accumulation {old_steps} → {steps}: the effective batch stays {whole}",
        old=batch, new=new, old_steps=old_steps, steps=steps, whole=batch * old_steps,
    )  # fmt: skip
    if knobs.accumulation is None:
        why = say("{why} (accumulation was not given and is taken to be 1)", why=why)
    return _step(knobs, why, batch=new, accumulation=steps)


def _step(knobs: CommandSettings, why: str, **values: int | bool) -> RetryStep:
    return RetryStep(replace(knobs, **values), values, why)  # type: ignore[arg-type]


def _stop(knobs: CommandSettings, why: str) -> RetryStep:
    return RetryStep(knobs, {}, why, stop=True)


def _why_nothing_helps(cause: Cause) -> str:
    if cause == "disk-full":
        return say("no setting makes room on a disk")
    if cause == "tmpdir-too-long":
        return say("no setting shortens the path for temporary files")
    if cause == "worker-killed":
        return say("a worker was killed again, and nothing shows that memory was short")
    if cause == "unknown":
        return say("the cause is not known, and the most likely one is not a pool that ran out")
    return say("memory was not at fault: other settings would not help")


def _nothing_left(cause: Cause, knobs: CommandSettings) -> str:
    if (
        knobs.batch is not None
        and knobs.batch > 1
        and "accumulation" not in knobs.can
        and not knobs.derives_accumulation
    ):
        return say(
            "the batch of {batch} could be smaller, but nothing on the command line would keep the effective batch: "
            "name the script's flag with --flag accumulation=--ITS-FLAG",
            batch=knobs.batch,
        )  # fmt: skip
    if not knobs.can:
        return say(
            "no setting was recognised on the command line: name them with --flag batch=--ITS-FLAG, workers=…"
        )
    return say("nothing is left to lower")
