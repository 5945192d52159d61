"""Tune a DataLoader that exists, between two epochs: its workers, prefetch and pinning.

Batch size and accumulation stay, because the trainer has counted its steps with them.
"""

from __future__ import annotations

import os
from typing import Any

from legroom.errors import LegroomError
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.loader.tune.legroom_tune import tune
from legroom.messages import say
from legroom.records.chosen_settings import Settings
from legroom.records.loader_settings_and_flags import LoaderKind
from legroom.system.lazy_and_optional_imports import lazy_import


def unwrap_loader(loader: Any) -> Any:
    """The DataLoader inside accelerate's wrapper."""
    return getattr(loader, "base_dataloader", loader)


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


def keep_share(prepared: Any) -> None:
    """Give a loader that accelerate has rebuilt with torch's class its ``share=`` again."""
    base = getattr(prepared, "base_dataloader", None)
    share = getattr(getattr(base, "collate_fn", None), "share", None)
    if base is None or share is None or getattr(base, "share", None) is not None:
        return
    what: dict[str, Any] = {"batch_sampler": base.batch_sampler}
    if base.batch_sampler is None:
        what = {"batch_size": None, "sampler": base.sampler}
    elif isinstance(base.dataset, lazy_import("torch.utils.data").IterableDataset):
        what = {"batch_size": base.batch_size, "drop_last": base.drop_last}
    prepared.base_dataloader = lazy_import("legroom").DataLoader(
        base.dataset, **what, num_workers=base.num_workers, collate_fn=base.collate_fn, pin_memory=base.pin_memory,
        timeout=base.timeout, worker_init_fn=base.worker_init_fn, generator=base.generator,
        multiprocessing_context=base.multiprocessing_context, prefetch_factor=base.prefetch_factor,
        persistent_workers=base.persistent_workers, share=share[0], on_slow=share[1],
    )  # fmt: skip
