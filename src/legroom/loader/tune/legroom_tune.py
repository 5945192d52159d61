"""``legroom.tune``: chooses settings for a dataset on this machine, from measurements of both.

``tune`` measures a dataset in this process; ``tune_named``, for the command line, measures one in a child process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

from legroom.advice.choose_settings import Climbed, Step, TuneRequest, choose, climb, within_dataset
from legroom.advice.choose_settings import preset as named_preset
from legroom.advice.explain_settings import changes, settle
from legroom.advice.fit_on_machine import per_rank
from legroom.errors import DatasetFailed, UsageError
from legroom.loader.measure.dataloader_throughput import time_step
from legroom.loader.measure.dataset_bytes_and_seconds import measure
from legroom.loader.measure.import_dataset import FoundDataset, chosen_batch_size, open_loader
from legroom.loader.measure.load_timed_samples import unchanged_random_state
from legroom.loader.measure.measure_in_child import AS_LOADER, in_child, measure_dataset, run_loader_in_child
from legroom.loader.rank_sampler import process_group, rank_and_world
from legroom.loader.tune.remembered_settings import key_of, last_settings, named_key, remember
from legroom.messages import say
from legroom.probe.snapshot import snapshot
from legroom.records.loader_settings_and_flags import (
    CompleteLoaderSettings,
    LoaderKind,
    from_environment,
    read_settings,
)
from legroom.records.machine import Machine
from legroom.records.settings_and_overrides import Settings
from legroom.records.workload import Measured
from legroom.system.argument_checks import check_arguments, check_integer, check_seconds
from legroom.system.lazy_and_optional_imports import require

log = logging.getLogger("legroom")

_DRAWING = 1.5  # seconds; below five in total, with the measurements of worker and step


def tune(
    dataset: Any,
    *,
    batch_size: int | None = None,
    effective_batch: int | None = None,
    step_seconds: float | None = None,
    step: Callable[[Any], Any] | None = None,
    ranks: int | None = None,
    collate_fn: Callable[[Any], Any] | None = None,
    preset: str | None = None,
    climb: bool = False,
    loader: LoaderKind | None = None,
    previous: Settings | Literal["last"] | None = None,
    machine: Machine | None = None,
    **overrides: Any,
) -> Settings:
    """Choose the lowest-memory loader and batch settings that keep up with the training step and fit in free memory.

    batch_size × accumulation × ranks stays ``effective_batch``.

    Args:
        dataset: Sampled for a second or two; of a DataLoader, its dataset and collate are used.
        batch_size: Largest number of samples per batch on one rank; None: that of the DataLoader.
        effective_batch: Samples per optimizer step; None: ``batch_size`` × ranks.
        step_seconds: Duration of a training step; the loader need not be faster.
        step: Or the step itself, called with a few real batches to time it. These calls train.
        ranks: Number of processes that train together; None: from the launcher, else 1.
        collate_fn: As for DataLoader; None: that of the DataLoader, or torch's.
        preset: ``"development"``, ``"production"`` or ``"cluster"``: how much of the free memory to use.
        climb: Run the loader with increasing settings and keep the last that worked.
        loader: Which DataLoader will run: ``"legroom"`` or ``"torch"``; None: as ``dataset`` is, else Legroom's.
        previous: Result of an earlier call: its measurements are reused, free memory is read again, and changes
            are logged. ``"last"`` uses the settings that worked in the last run.
        machine: The machine to fit into; None: this one.
        **overrides: Settings by name that are fixed; those in ``LEGROOM_SETTINGS`` take precedence.
    """
    check_arguments(tune, locals(), ("step_seconds", "preset"))
    _check_step(step_seconds, step)
    require("torch.utils.data", "torch", "legroom.tune")
    if isinstance(dataset, str):
        raise UsageError(
            say("{spec} is not a dataset", spec=repr(dataset)),
            why=say("a value of type {kind} cannot be used for it", kind="str"),
            fix=(say("import the dataset, and pass it instead of its name"),),
        )
    opened = open_loader(dataset, collate_fn)
    dataset, collate_fn, own = opened.dataset, opened.collate_fn, opened.settings
    if batch_size is not None:
        batch_size = check_integer("batch_size", batch_size, 1)
    fixed = read_settings(overrides).changed(from_environment(os.environ)).given()
    batch_size, loader = chosen_batch_size(batch_size, own), _kind(fixed.get("loader_kind", loader), own)
    world = rank_and_world(None, None, os.environ, process_group())[1] if ranks is None else ranks
    # Checked before measuring, which takes seconds.
    per_rank(batch_size, effective_batch, world)
    named_preset(preset)
    key = key_of(dataset)
    before = last_settings(key) if previous == "last" else previous
    with unchanged_random_state():
        measured = _measured(opened, batch_size, loader, world, before)
        timed = _step(dataset, collate_fn, batch_size, step_seconds, step)
    request = TuneRequest(
        batch_size=batch_size,
        effective_batch=effective_batch,
        ranks=world,
        local_ranks=_local(world),
        step=timed,
        loader_kind=loader,
        preset=preset,
    )
    request, machine = within_dataset(request, measured), machine or snapshot()
    with unchanged_random_state():
        climbed = _climbed(opened, measured, machine, request) if climb else None
    settings = settle(measured, machine, request, fixed, climbed)
    _log_settings(settings, before)
    if isinstance(previous, Settings):
        remember("settings", key, previous)  # an epoch has run with them
    elif climbed is not None:
        remember("settings", key, settings.roll_back())  # without the overrides: the runs did not use them
    return settings


def _kind(given: LoaderKind | None, own: Mapping[str, Any] | None) -> LoaderKind:
    """Whose DataLoader will run: the given one, else that which the dataset was given as."""
    if given is not None:
        return given
    return "legroom" if own is None or own["loader"] == "legroom" else "torch"


def _local(world: int) -> int:
    """Ranks on this machine, if the launcher sets LOCAL_WORLD_SIZE."""
    text = os.environ.get("LOCAL_WORLD_SIZE", "")
    return min(world, int(text)) if text.isdigit() and int(text) else world


def nodes_of(ranks: int) -> int:
    """Machines that these ranks are on, if the launcher sets LOCAL_WORLD_SIZE; else one."""
    return -(-ranks // _local(ranks))


def _measured(opened: FoundDataset, batch_size: int, kind: LoaderKind, ranks: int, before: Settings | None) -> Measured:
    if before is not None and before.measured is not None and before.measured.batch_size == batch_size:
        return before.measured
    measured = measure(
        opened.dataset, batch_size=batch_size, collate_fn=opened.collate_fn, seconds=_DRAWING, transport=kind,
        rows=opened.rows(), settings=opened.settings,
    )  # fmt: skip
    return replace(measured, rows=measured.rows_of(ranks))


def _step(
    dataset: Any,
    collate_fn: Callable[[Any], Any] | None,
    batch_size: int,
    seconds: float | None,
    step: Callable[[Any], Any] | None,
) -> Step:
    if step is not None:
        return time_step(dataset, collate_fn, batch_size, step)
    return Step() if seconds is None else Step(seconds)


def _check_step(seconds: float | None, step: Callable[[Any], Any] | None) -> None:
    if seconds is not None and step is not None:
        raise UsageError(
            say("pass either step_seconds or step, not both"),
            why=say("step_seconds is the time of a step, step is called to measure it"),
            fix=(say("pass one of them"),),
        )
    if seconds is not None:
        check_seconds("step_seconds", seconds)


def _climbed(opened: FoundDataset, measured: Measured, machine: Machine, request: TuneRequest) -> Climbed:
    return climb(
        choose(measured, machine, request),
        lambda settings: run_loader_in_child(
            opened.dataset, opened.collate_fn, settings, request.step.seconds, opened.loader
        ),
    )


def _log_settings(settings: Settings, before: Settings | None) -> None:
    if before is None:
        for line in settings.why.values():
            log.info("%s", line)
    else:
        for line in changes(before, settings).values():
            log.info("%s", line)
    if settings.plan is not None and settings.plan.verdict == "too-big":
        for problem in settings.plan.problems:
            log.warning("%s", problem.message)


def tune_named(
    spec: str,
    *,
    batch_size: int | None = None,
    effective_batch: int | None = None,
    step_seconds: float = 0.0,
    ranks: int = 1,
    collate: str | None = None,
    preset: str | None = None,
    climbing: bool = False,
    kind: LoaderKind | None = None,
    by_hand: Mapping[str, Any] | None = None,
    timeout: float = 60,
) -> Settings:
    """Like ``tune``, for a dataset given as ``module:name``: all user code runs in a child process.

    The memory that the dataset took in the child counts as memory of the training process.
    """
    wanted = read_settings(by_hand or {}).given()
    kind = wanted.get("loader_kind", kind)
    if batch_size is None:  # that of the DataLoader; the other numbers are checked now
        per_rank(1, effective_batch, ranks)
    else:
        per_rank(batch_size, effective_batch, ranks)
    named_preset(preset)
    measured = measure_dataset(
        spec, batch_size=batch_size, collate=collate, timeout=timeout, seconds=1.5, transport=kind or AS_LOADER
    )
    measured = replace(measured, rows=measured.rows_of(ranks))
    batch_size, kind = chosen_batch_size(batch_size, measured.loader), _kind(kind, measured.loader)
    per_rank(batch_size, effective_batch, ranks)
    request = TuneRequest(
        batch_size=batch_size,
        effective_batch=effective_batch,
        ranks=ranks,
        local_ranks=_local(ranks),
        step=Step(step_seconds),
        loader_kind=kind,
        preset=preset,
        process_ram=measured.process_ram or 0,
    )
    request, machine = within_dataset(request, measured), snapshot()

    def run(tried: CompleteLoaderSettings) -> float | str:
        try:
            answer = in_child(
                spec, timeout, task="run_loader", spec=spec, collate=collate, settings=asdict(tried),
                step_seconds=step_seconds,
            )  # fmt: skip
        except DatasetFailed as problem:
            return problem.why or problem.what
        return float(answer["rate"])

    climbed = climb(choose(measured, machine, request), run) if climbing else None
    settings = settle(measured, machine, request, wanted, climbed)
    if climbed is not None:
        remember("settings", named_key(spec), settings.roll_back())  # without the overrides: the runs did not use them
    return settings
