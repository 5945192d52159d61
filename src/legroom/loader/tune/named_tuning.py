"""Settings for a dataset that is named, not held: everything of the user's runs in a child.

Covers: what `legroom tune` does. Does not cover: the choice (budget.choose), a dataset in this process (tuning.py).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from legroom.budget.choose import Ask, Rung, choose
from legroom.budget.climbing import climb
from legroom.budget.effective import per_rank
from legroom.budget.pace import Step
from legroom.budget.presets import preset as named_preset
from legroom.budget.settle import settle
from legroom.errors import DatasetFailed
from legroom.loader.measure.apart import in_child, measure_dataset
from legroom.loader.tune.remembered import key_of, recall, remember
from legroom.loader.tune.transport import Kind
from legroom.model import Settings
from legroom.model.settings_env import checked
from legroom.probe.snapshot import snapshot


def tune_named(
    spec: str,
    *,
    batch_size: int,
    effective_batch: int | None = None,
    step_seconds: float = 0.0,
    ranks: int = 1,
    collate: str | None = None,
    preset: str | None = None,
    climbing: bool = False,
    kind: Kind = "legroom",
    by_hand: Mapping[str, Any] | None = None,
    timeout: float = 60,
) -> Settings:
    """Like legroom.tune; the training that is to run is counted with the memory its dataset took in the child."""
    wanted = checked(by_hand or {})
    per_rank(batch_size, effective_batch, ranks)
    named_preset(preset)
    measured = measure_dataset(
        spec, batch_size=batch_size, collate=collate, timeout=timeout, seconds=1.5, transport=kind
    )
    ask = Ask(
        batch_size=batch_size,
        effective_batch=effective_batch,
        ranks=ranks,
        step=Step(step_seconds),
        loader_kind=kind,
        preset=preset,
        process_ram=measured.process_ram or 0,
    )
    box = snapshot()

    def run(rung: Rung) -> float | str:
        try:
            told = in_child(
                spec, timeout, work="attempt", spec=spec, collate=collate, rung=asdict(rung), kind=kind,
                step_seconds=step_seconds,
            )  # fmt: skip
        except DatasetFailed as problem:
            return problem.why
        return float(told["rate"])

    climbed = climb(measured, box, ask, choose(measured, box, ask), run) if climbing else None
    settings = settle(measured, box, ask, wanted, climbed)
    if climbed is not None:
        remember(named_key(spec), settings.roll_back())  # what was set by hand was not climbed with
    return settings


def named_key(spec: str) -> str:
    """What a named dataset is remembered by: where it was asked for, and its name."""
    return key_of(spec, script=os.getcwd())


def last_named(spec: str) -> Settings | None:
    """The last settings that worked for that dataset from this directory."""
    return recall(named_key(spec))
