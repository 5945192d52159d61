"""Tune a DataLoader that exists, between two epochs: its workers, prefetch and pinning.

Batch size and accumulation stay, because the trainer has counted its steps with them.
"""

from __future__ import annotations

import os
from typing import Any

from legroom.errors import LegroomError
from legroom.integrations.guard.loader_prepared_by_accelerate import unwrap_loader
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.loader.tune.legroom_tune import tune
from legroom.messages import say
from legroom.records.loader_settings_and_flags import LoaderKind
from legroom.records.settings_and_overrides import Settings


def retune(loader: Any, *, accumulation: int, previous: Settings | None) -> tuple[Settings | None, str | None]:
    """Settings for that loader on this machine now, and a note. Failures become a note: training continues."""
    from torch.utils.data import DataLoader

    loader = unwrap_loader(loader)
    if not isinstance(loader, DataLoader):
        return None, say("not tuned: {kind} is not a DataLoader", kind=type(loader).__name__)
    size = loader.batch_size or getattr(loader.batch_sampler, "batch_size", None)
    if not isinstance(size, int):
        return None, say("not tuned: the loader has no batch_size")
    kind: LoaderKind = "legroom" if hasattr(loader, "memory_budget") else "torch"
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
        "batch {batch} × accumulation {steps} would fit better; this run keeps {size} × {now}",
        batch=found.batch_size, steps=found.accumulation, size=size, now=accumulation,
    )  # fmt: skip
    return found.override(batch_size=size, accumulation=accumulation), note


def apply_settings(loader: Any, settings: Settings) -> list[str]:
    """Change the loader for its next epoch; returns sentences about what was or could not be changed."""
    loader = unwrap_loader(loader)
    wanted = {"num_workers": settings.num_workers, "pin_memory": settings.pin_memory}
    if settings.num_workers:
        wanted["prefetch_factor"] = settings.prefetch_factor or 2
    changes = {name: value for name, value in wanted.items() if getattr(loader, name) != value}
    if not changes:
        return []
    if loader.persistent_workers:
        return [say("loader not changed: persistent workers live through all epochs")]
    if settings.num_workers and getattr(loader, "transport", None) == "none":
        # Created without workers, it has no transport of its own: batches of workers would go through /dev/shm.
        return [say("loader not changed: a legroom.DataLoader created without workers cannot get any later")]
    changed = [
        say("{name}: {old} → {new}", name=name, old=getattr(loader, name), new=value) for name, value in changes.items()
    ]
    for name, value in changes.items():
        setattr(loader, name, value)
    return changed
