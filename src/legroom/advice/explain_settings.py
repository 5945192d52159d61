"""Complete settings from a recommendation, with one reason per setting and further options to save memory.

Also the settings around the DataLoader: data mode, persistent workers, threads, the CUDA allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from legroom.advice.choose_settings import (
    SLACK,
    Climbed,
    TuneCase,
    TunedChoice,
    TuneRequest,
    choose,
    most_workers,
    pace,
    plan_of,
    workload,
)
from legroom.advice.memory_need import need
from legroom.messages import RANKS, SAMPLES, counted, joined, phrase, say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.machine import Machine
from legroom.records.settings_and_overrides import Lever, Settings
from legroom.records.workload import Measured, Plan
from legroom.units import format_duration, format_size


def milliseconds(seconds: float) -> str:
    """Three figures: ``0.412 ms``, ``11.2 ms``, ``1.2 s``, ``28.4 s``."""
    if seconds >= 99.95:
        return format_duration(seconds)
    value = seconds * 1000
    if value >= 999.5:
        return f"{seconds:.3g} s"
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} ms"


def reasons(choice: TunedChoice) -> dict[str, str]:
    """The reason for each setting."""
    lines = {"batch_size": _batch(choice), "accumulation": _accumulation(choice), "num_workers": _workers(choice)}
    if choice.settings.num_workers:
        lines["prefetch_factor"] = _prefetch(choice)
    lines["pin_memory"] = _pin(choice)
    return lines


def _batch(choice: TunedChoice) -> str:
    request, measured, batch = choice.request, choice.measured, choice.settings.batch_size
    if batch == request.batch_size and request.larger_than_dataset is not None:
        return say(
            "batch {batch} instead of {asked}: the dataset has no more samples for each rank",
            batch=batch, asked=request.larger_than_dataset,
        )  # fmt: skip
    if batch == request.batch_size:
        size = format_size(measured.batch_bytes * batch // measured.batch_size)
        return say("batch {batch}: as requested, {size}", batch=batch, size=size)
    return say(
        "batch {batch} instead of {asked}: {problem}",
        batch=batch, asked=request.batch_size, problem=_problem(choice.refused),
    )  # fmt: skip


def _accumulation(choice: TunedChoice) -> str:
    batch, ranks = choice.settings.batch_size, choice.request.ranks
    steps = choice.together // batch
    text = phrase("accumulation {steps}: {batch} × {steps} × {ranks} = {samples} per optimizer step, unchanged")
    if choice.request.larger_than_dataset is not None:
        text = phrase("accumulation {steps}: {batch} × {steps} × {ranks} = {samples} per optimizer step")
    return say(
        text, steps=steps, batch=batch, ranks=counted(ranks, *RANKS), samples=counted(batch * steps * ranks, *SAMPLES)
    )


def _workers(choice: TunedChoice) -> str:
    measured, candidate, ideal = choice.measured, choice.settings, choice.ideal
    if measured.unsendable is not None:
        return say("workers 0: a batch cannot be sent from a worker ({why})", why=measured.unsendable)
    if candidate.num_workers < ideal.num_workers:
        return say(
            "workers {workers}: {ideal} would be faster, but {problem}",
            workers=candidate.num_workers, ideal=ideal.num_workers, problem=_problem(choice.refused),
        )  # fmt: skip
    if not candidate.num_workers:
        return _no_workers(choice)
    sample, step = milliseconds(measured.worker_seconds), choice.request.step.seconds
    if step:
        head = say(
            "workers {workers}: {sample} per sample, {step} per training step of {samples}",
            workers=candidate.num_workers, sample=sample, step=milliseconds(step),
            samples=counted(candidate.batch_size, *SAMPLES),
        )  # fmt: skip
    else:
        head = say("workers {workers}: {sample} per sample", workers=candidate.num_workers, sample=sample)
    return joined((head, _why_no_more(choice)))


def _no_workers(choice: TunedChoice) -> str:
    most, bound = most_workers(choice)
    if not most:
        return say("workers 0: {why}", why=_bound(bound, choice))
    here = milliseconds(pace(choice, choice.settings))
    one = milliseconds(pace(choice, replace(choice.settings, num_workers=1, prefetch_factor=2)))
    return say("workers 0: a batch every {here} without workers, every {one} with one", here=here, one=one)


_BOUNDS = {
    "cores": phrase("no core for another worker: {cores:g} per rank"),
    "waiting": phrase("{share:.0%} of that is waiting; at most four workers per core are tried"),
    "iterable": phrase("an iterable dataset that does not shard itself repeats every sample in each worker"),
    "preset": phrase("the limit of the preset"),
    "batches": phrase("as many as an epoch has batches"),
    "most": phrase("the most that is tried"),
}


def _bound(name: str, choice: TunedChoice) -> str:
    measured = choice.measured
    share = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    return say(_BOUNDS[name], cores=choice.cores, share=share)


def _why_no_more(choice: TunedChoice) -> str:
    candidate, step = choice.settings, choice.request.step.seconds
    most, bound = most_workers(choice)
    if candidate.num_workers >= most:
        return _bound(bound, choice)
    now = pace(choice, candidate)
    if step and now <= step * SLACK:
        return say("another worker would be idle")
    more = pace(choice, replace(candidate, num_workers=candidate.num_workers + 1))
    return say("another worker would gain {share:.0%}", share=max(0.0, 1 - more / now))


def _prefetch(choice: TunedChoice) -> str:
    candidate, measured = choice.settings, choice.measured
    if candidate.prefetch_factor < choice.ideal.prefetch_factor:
        return say(
            "prefetch {prefetch}: {ideal} would hide slow samples, but {problem}",
            prefetch=candidate.prefetch_factor, ideal=choice.ideal.prefetch_factor, problem=_problem(choice.refused),
        )  # fmt: skip
    idle = measured.transport.latency_seconds if measured.transport else 0.0
    return say(
        "prefetch {prefetch}: time per sample varies by {spread:.0%}, a worker without prefetch idles "
        "{idle} per batch; {flights}",
        prefetch=candidate.prefetch_factor, spread=measured.spread, idle=milliseconds(idle),
        flights=counted(
            candidate.num_workers * candidate.prefetch_factor,
            phrase("{count} batch in flight"), phrase("{count} batches in flight"),
        ),
    )  # fmt: skip


def _pin(choice: TunedChoice) -> str:
    if not choice.machine.gpus.cards:
        return say("pin_memory off: no GPU found")
    if not choice.settings.pin_memory and choice.refused is None:
        return say("pin_memory off: as set")
    if not choice.settings.pin_memory:
        return say("pin_memory off: it uses host RAM, and {problem}", problem=_problem(choice.refused))
    return say("pin_memory on: uses {size} of host RAM, no /dev/shm", size=format_size(choice.plan.need.pinned))


def _problem(plan: Plan | None) -> str:
    if plan is None or not plan.problems:
        return say("it does not fit")
    return plan.problems[0].message


# Settings around the DataLoader, each with its reason.


def _persistent(choice: TunedChoice) -> tuple[bool, str]:
    if not choice.settings.num_workers:
        return False, say("persistent_workers off: no workers")
    if not choice.bounds.persistent:
        return False, say("persistent_workers off: preset {name}", name=choice.bounds.name)
    return True, say("persistent_workers on: workers are not restarted every epoch")


def _low_memory(choice: TunedChoice) -> tuple[bool, str]:
    measured, ranks, ram = choice.measured, choice.request.here, choice.machine.pool("ram")
    if measured.rows is None:
        return False, say("low_memory off: the dataset has no length")
    if ram is None or ram.free is None:
        return False, say("low_memory off: free RAM is unknown")
    # Every rank keeps it in memory; workers copy pages too when they touch Python objects.
    data = measured.rows * measured.sample_bytes * ranks
    room = int(ram.free * choice.bounds.share)
    figures = {
        "samples": counted(measured.rows, *SAMPLES), "each": format_size(measured.sample_bytes),
        "ranks": counted(ranks, *RANKS), "data": format_size(data), "room": format_size(room),
    }  # fmt: skip
    if data > room:
        return True, say(
            "low_memory on: {samples} × {each} × {ranks} = {data}, more than the {room} of "
            "RAM available: map or stream the data",
            **figures,
        )
    return False, say("low_memory off: {samples} × {each} × {ranks} = {data}, {room} of RAM available", **figures)


def _threads(choice: TunedChoice) -> tuple[int, str]:
    cores, workers = int(choice.cores), choice.settings.num_workers
    # With a GPU the training process mostly waits; without one it does the work.
    threads = max(1, cores // (workers + 1) if choice.machine.gpus.cards else cores - workers)
    return threads, say(
        "threads {threads}: {cores} per rank, {workers} of them for workers",
        threads=threads, workers=min(cores, workers),
        cores=counted(cores, phrase("{count} core"), phrase("{count} cores")),
    )  # fmt: skip


def _allocator(machine: Machine) -> tuple[str | None, str]:
    if not machine.gpus.cards:
        return None, say("allocator unset: no GPU found")
    if machine.runtime.platform != "linux":
        return None, say("allocator unset: expandable segments need Linux")
    return "expandable_segments:True", say("allocator expandable_segments: reduces fragmentation of GPU memory")


_QUARTER = 4


def levers(choice: TunedChoice) -> tuple[Lever, ...]:
    """Further options to save memory with these settings."""
    return (*_loader(choice), *_samples(choice), *_model())


def _ram(case: TuneCase, candidate: CompleteLoaderSettings) -> int:
    return need(workload(case, candidate)).ram


def _loader(choice: TunedChoice) -> Iterator[Lever]:
    now, candidate = _ram(choice, choice.settings), choice.settings

    def saving(name: str, what: str, value: Any) -> Lever:
        return Lever(name, "ram", now - _ram(choice, replace(candidate, **{name: value})), what)

    if candidate.num_workers:
        yield saving("num_workers", say("no workers: the training step waits for every batch"), 0)
    if candidate.num_workers and candidate.prefetch_factor > 1:
        yield saving("prefetch_factor", say("prefetch 1: a slow sample stalls training"), 1)
    if candidate.pin_memory:
        yield saving("pin_memory", say("pin_memory off: copies to the GPU are synchronous"), False)
    if candidate.batch_size % 2 == 0:
        what = say("half the batch size, twice the accumulation: saves even more GPU memory")
        yield saving("batch_size", what, candidate.batch_size // 2)


def _samples(choice: TunedChoice) -> Iterator[Lever]:
    """A quarter less length saves a quarter of the bytes; a quarter off each image side nearly half."""
    measured = choice.measured
    largest = max(measured.tensors, default=0)
    if not largest:
        return
    for name, kept, what in (
        (
            "sequence_length",
            1 - 1 / _QUARTER,
            say("sequences a quarter shorter, if the largest tensor scales with their length"),
        ),
        (
            "image_size",
            (1 - 1 / _QUARTER) ** 2,
            say("images a quarter smaller per side, if the largest tensor is the image"),
        ),
    ):
        # A batch may have several of that size, as input_ids, attention_mask and labels: all become smaller.
        tensors = tuple(int(size * kept) if size == largest else size for size in measured.tensors)
        smaller = replace(choice, measured=replace(measured, tensors=tensors))
        saved = _ram(choice, choice.settings) - _ram(smaller, choice.settings)
        yield Lever(name, "ram", max(0, saved), what)


def _model() -> Iterator[Lever]:
    yield Lever(
        "mixed_precision", "gpu", None, say("bfloat16 activations: about half the memory of float32 (not measured)")
    )
    yield Lever(
        "activation_checkpointing", "gpu", None, say("recompute activations in the backward pass (saving not measured)")
    )


def settle(
    measured: Measured,
    machine: Machine,
    request: TuneRequest,
    by_hand: Mapping[str, Any] | None = None,
    climbed: Climbed | None = None,
) -> Settings:
    """The settings for this dataset on this machine; ``by_hand`` overrides, setting by setting."""
    if by_hand and "loader_kind" in by_hand:  # before the choice: what fits differs between the two
        request = replace(request, loader_kind=by_hand["loader_kind"])
    choice = choose(measured, machine, request)
    if climbed is not None:
        choice = _at(climbed.settings, choice)
    settings = _settings(choice)
    if climbed is not None:
        settings = replace(settings, why={**settings.why, "num_workers": climbed.why})
    if not by_hand:
        return settings
    overridden = settings.override(**by_hand)
    wanted = {name: getattr(overridden, name) for name in overridden.before}
    # Dependent settings follow from the override, not from the settings it replaces.
    around_them = _settings(_at(_by_hand(choice.settings, wanted), choice))
    return replace(
        around_them,
        **wanted,
        why={**around_them.why, **{name: overridden.why[name] for name in wanted}},
        before=overridden.before,
    )


def _at(candidate: CompleteLoaderSettings, choice: TunedChoice) -> TunedChoice:
    return replace(choice, settings=candidate, ideal=candidate, refused=None, plan=plan_of(choice, candidate))


def _settings(choice: TunedChoice) -> Settings:
    candidate, why = choice.settings, reasons(choice)
    persistent, why["persistent_workers"] = _persistent(choice)
    low_memory, why["low_memory"] = _low_memory(choice)
    threads, why["threads"] = _threads(choice)
    allocator, why["allocator"] = _allocator(choice.machine)
    return Settings(
        batch_size=candidate.batch_size,
        accumulation=choice.together // candidate.batch_size,
        ranks=choice.request.ranks,
        num_workers=candidate.num_workers,
        prefetch_factor=candidate.prefetch_factor if candidate.num_workers else None,
        persistent_workers=persistent,
        pin_memory=candidate.pin_memory,
        low_memory=low_memory,
        threads=threads,
        allocator=allocator,
        loader_kind=choice.request.loader_kind,
        why=why,
        levers=levers(choice),
        measured=choice.measured,
        plan=choice.plan,
    )


def _by_hand(candidate: CompleteLoaderSettings, wanted: Mapping[str, Any]) -> CompleteLoaderSettings:
    names = ("batch_size", "num_workers", "prefetch_factor", "persistent_workers", "pin_memory")
    return replace(candidate, **{name: wanted[name] for name in names if name in wanted})


def changes(before: Settings, after: Settings) -> dict[str, str]:
    """The settings that changed, each with its new reason."""
    old, new = before.values(), after.values()
    return {
        name: say("{name} {old} → {new} ({why})", name=name, old=old[name], new=new[name], why=after.why.get(name, ""))
        for name in new
        if old[name] != new[name]
    }
