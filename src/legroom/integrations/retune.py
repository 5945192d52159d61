"""A trainer's own DataLoader, tuned again between two epochs.

Covers: asking ``tune`` about a loader that exists, and changing of it what can be changed: workers, prefetch, pinning.
Does not cover: the batch and the accumulation, which the trainer has counted its steps with and which stay.
"""

from __future__ import annotations

import os
from typing import Any

from legroom.errors import LegroomError
from legroom.loader.rows.ranks import process_group, rank_and_world
from legroom.loader.tune.transport import Kind
from legroom.loader.tune.tuning import tune
from legroom.model import Settings
from legroom.words import say


def innermost(loader: Any) -> Any:
    """The DataLoader below accelerate's wrapping."""
    return getattr(loader, "base_dataloader", loader)


def retune(
    loader: Any, *, accumulation: int, previous: Settings | None
) -> tuple[Settings | None, str | None]:
    """Settings for that loader on this box now, or why there are none: a training never ends because of this."""
    from torch.utils.data import DataLoader

    loader = innermost(loader)
    if not isinstance(loader, DataLoader):
        return None, say("not tuned: {kind} is no DataLoader", kind=type(loader).__name__)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None, say("not tuned: the loader has no batch size of its own")
    kind: Kind = "legroom" if hasattr(loader, "memory_budget") else "torch"
    _, world = rank_and_world(None, None, os.environ, process_group())
    try:
        found = tune(
            loader,
            batch_size=size,
            effective_batch=size * accumulation * world,
            ranks=world,
            loader=kind,
            previous=previous,
        )
    except (LegroomError, RuntimeError, OSError) as problem:
        return None, say("not tuned: {problem}", problem=str(problem).partition("\n")[0])
    if found.batch_size == size:
        return found, None
    note = say(
        "batch {batch} × accumulation {steps} would fit better; a training that has begun keeps {size} × {now}",
        batch=found.batch_size, steps=found.accumulation, size=size, now=accumulation,
    )  # fmt: skip
    return found.override(batch_size=size, accumulation=accumulation), note


def apply(loader: Any, settings: Settings) -> list[str]:
    """Change the loader for its next epoch; what was changed, or what could not be, in words."""
    loader = innermost(loader)
    wanted = {"num_workers": settings.num_workers, "pin_memory": settings.pin_memory}
    if settings.num_workers:
        wanted["prefetch_factor"] = settings.prefetch_factor or 2
    changes = {name: value for name, value in wanted.items() if getattr(loader, name) != value}
    if not changes:
        return []
    if loader.persistent_workers:
        return [say("kept as it is: its workers are persistent and live through all epochs")]
    if settings.num_workers and getattr(loader, "transport", None) == "none":
        # Made without workers, its collate carries nothing: workers' batches would travel through /dev/shm.
        return [say("kept as it is: a legroom.DataLoader made without workers does not get any")]
    told = [
        say("{name}: {old} → {new}", name=name, old=getattr(loader, name), new=value)
        for name, value in changes.items()
    ]
    for name, value in changes.items():
        setattr(loader, name, value)
    return told
