"""Batch, accumulation, workers, pinning and low-memory mode, chosen from free memory at every epoch.

Flags fix a setting, `legroom.tune` chooses the others, and all ranks get the same choice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import zero
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rows import FirstRows
from text import Batch

import legroom
from legroom.records import Settings

# Settings that flags may fix, and the flags.
CHOSEN = {"low_memory": "ultra_low_mem", "num_workers": "num_workers", "pin_memory": "pin_memory"}


def fixed(flags: argparse.Namespace) -> dict[str, Any]:
    """The settings given by flags; a flag that is left out next time lets the setting be chosen again."""
    given = {name: getattr(flags, flag) for name, flag in CHOSEN.items()}
    return {name: value for name, value in given.items() if value is not None}


def because(settings: Settings, why: str, **changes: Any) -> Settings:
    """The settings with some of them changed, for a reason that the log shows."""
    told = {}
    for name, value in changes.items():
        shown = ("on" if value else "off") if isinstance(value, bool) else value
        told[name] = f"{name} {shown}: {why}"
    return replace(settings, **changes, why={**settings.why, **told})


def choose(
    accelerator: Accelerator, flags: argparse.Namespace, rows: FirstRows, collate: Batch, *,
    previous: Settings | None, step: Callable[[Any], object] | None = None, step_seconds: float | None = None,
) -> Settings:  # fmt: skip
    """Settings for the next epoch. ``step`` is run a few times for timing; ``step_seconds`` is a known time."""
    chosen: list[Settings | legroom.LegroomError | None] = [None]
    if accelerator.is_main_process:  # the ranks must not decide differently
        batch, ranks = flags.batch_size_per_gpu, accelerator.num_processes
        by_hand = fixed(flags)
        nothing_left = len(by_hand) == len(CHOSEN)
        if zero.in_use(accelerator):  # DeepSpeed has got both at its start
            by_hand |= {"batch_size": batch, "accumulation": flags.gradient_accumulation_steps}
        try:
            if nothing_left:  # then nothing is measured
                given = Settings(batch, flags.gradient_accumulation_steps, ranks)
                chosen = [given.override(**by_hand)]
            else:
                effective = batch * flags.gradient_accumulation_steps * ranks
                chosen = [
                    legroom.tune(
                        rows, batch_size=batch, effective_batch=effective, ranks=ranks, collate_fn=collate,
                        step=step, step_seconds=step_seconds, previous=previous, **by_hand,
                    )
                ]  # fmt: skip
        except legroom.LegroomError as problem:
            chosen = [problem]  # the others wait for an answer
    broadcast_object_list(chosen)
    (found,) = chosen
    if isinstance(found, legroom.LegroomError):
        raise found
    return found
