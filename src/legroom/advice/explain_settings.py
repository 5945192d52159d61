"""Complete settings from a recommendation, with one reason per setting and further options to save memory.

Also the settings around the DataLoader: data mode, persistent workers, threads, the CUDA allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from legroom.advice.choose_settings import (
    SLACK,
    Climbed,
    TunedChoice,
    TuneRequest,
    choose,
    most_workers,
    pace,
    plan_of,
    workload,
)
from legroom.advice.memory_need import need
from legroom.messages import counted, joined, phrase, say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.machine import Machine
from legroom.records.settings_and_overrides import Lever, Settings
from legroom.records.workload import Measured, Need, Plan
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


def reasons(measured: Measured, machine: Machine, request: TuneRequest, choice: TunedChoice) -> dict[str, str]:
    """The reason for each setting."""
    candidate = choice.settings
    lines = {
        "batch_size": _batch(measured, request, choice),
        "accumulation": _accumulation(request, choice),
        "num_workers": _workers(measured, request, choice),
    }
    if candidate.num_workers:
        lines["prefetch_factor"] = _prefetch(measured, choice)
    lines["pin_memory"] = _pin(machine, choice)
    return lines


def _batch(measured: Measured, request: TuneRequest, choice: TunedChoice) -> str:
    batch = choice.settings.batch_size
    if batch == request.batch_size and request.larger_than_dataset is not None:
        return say(
            "batch {batch} instead of {asked}: the dataset has no more samples for each rank",
            batch=batch, asked=request.larger_than_dataset,
        )  # fmt: skip
    if batch == request.batch_size:
        return say("batch {batch}: as requested, {size}", batch=batch, size=_batch_bytes(measured, batch))
    return say(
        "batch {batch} instead of {asked}: {problem}",
        batch=batch, asked=request.batch_size, problem=_problem(choice.refused),
    )  # fmt: skip


def _batch_bytes(measured: Measured, batch: int) -> str:
    return format_size(measured.batch_bytes * batch // measured.batch_size)


def _ranks(count: int) -> str:
    return counted(count, phrase("{count} rank"), phrase("{count} ranks"))


def _sample_count(count: int) -> str:
    return counted(count, phrase("{count} sample"), phrase("{count} samples"))


def _accumulation(request: TuneRequest, choice: TunedChoice) -> str:
    batch, steps = choice.settings.batch_size, choice.together // choice.settings.batch_size
    return say(
        "accumulation {steps}: {batch} × {steps} × {ranks} = {samples} per optimizer step, unchanged",
        steps=steps, batch=batch, ranks=_ranks(request.ranks), samples=_sample_count(batch * steps * request.ranks),
    )  # fmt: skip


def _workers(measured: Measured, request: TuneRequest, choice: TunedChoice) -> str:
    candidate, ideal = choice.settings, choice.ideal
    if measured.unsendable is not None:
        return say("workers 0: a batch cannot be sent from a worker ({why})", why=measured.unsendable)
    if candidate.num_workers < ideal.num_workers:
        return say(
            "workers {workers}: {ideal} would be faster, but {problem}",
            workers=candidate.num_workers, ideal=ideal.num_workers, problem=_problem(choice.refused),
        )  # fmt: skip
    if not candidate.num_workers:
        return _no_workers(measured, request, choice)
    sample = milliseconds(measured.worker_seconds)
    if request.step.seconds:
        head = say(
            "workers {workers}: {sample} per sample, {step} per training step of {samples}",
            workers=candidate.num_workers, sample=sample, step=milliseconds(request.step.seconds),
            samples=_sample_count(candidate.batch_size),
        )  # fmt: skip
    else:
        head = say("workers {workers}: {sample} per sample", workers=candidate.num_workers, sample=sample)
    return joined((head, _why_no_more(measured, request, choice)))


def _no_workers(measured: Measured, request: TuneRequest, choice: TunedChoice) -> str:
    here = milliseconds(pace(measured, choice.settings, choice.cores, request.step))
    most, bound = most_workers(measured, request, choice.cores, choice.bounds)
    if not most:
        return say("workers 0: {why}", why=_bound(bound, measured, choice))
    one = milliseconds(
        pace(measured, replace(choice.settings, num_workers=1, prefetch_factor=2), choice.cores, request.step)
    )
    return say("workers 0: a batch every {here} without workers, every {one} with one", here=here, one=one)


_BOUNDS = {
    "cores": phrase("no core for another worker: {cores:g} per rank"),
    "waiting": phrase("{share:.0%} of that is waiting; at most four workers per core are tried"),
    "iterable": phrase("an iterable dataset that does not shard itself repeats every sample in each worker"),
    "preset": phrase("the limit of the preset"),
    "batches": phrase("as many as an epoch has batches"),
    "most": phrase("the most that is tried"),
    "unsendable": phrase("a batch cannot be sent from a worker"),
}


def _bound(name: str, measured: Measured, choice: TunedChoice) -> str:
    share = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    return say(_BOUNDS[name], cores=choice.cores, share=share)


def _why_no_more(measured: Measured, request: TuneRequest, choice: TunedChoice) -> str:
    candidate = choice.settings
    most, bound = most_workers(measured, request, choice.cores, choice.bounds)
    if candidate.num_workers >= most:
        return _bound(bound, measured, choice)
    now = pace(measured, candidate, choice.cores, request.step)
    more = pace(measured, replace(candidate, num_workers=candidate.num_workers + 1), choice.cores, request.step)
    if request.step.seconds and now <= request.step.seconds * SLACK:
        return say("another worker would be idle")
    return say("another worker would gain {share:.0%}", share=max(0.0, 1 - more / now))


def _prefetch(measured: Measured, choice: TunedChoice) -> str:
    candidate = choice.settings
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


def _pin(machine: Machine, choice: TunedChoice) -> str:
    if not machine.gpus.cards:
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


@dataclass(frozen=True, slots=True)
class Around:
    """Settings around the DataLoader, and their reasons."""

    persistent_workers: bool
    low_memory: bool
    threads: int
    allocator: str | None
    why: dict[str, str]


def around(measured: Measured, machine: Machine, request: TuneRequest, choice: TunedChoice) -> Around:
    """The settings around the DataLoader that go with that choice on this machine."""
    why: dict[str, str] = {}
    persistent, why["persistent_workers"] = _persistent(choice)
    low, why["low_memory"] = _low_memory(measured, machine, request, choice)
    threads, why["threads"] = _threads(machine, choice)
    allocator, why["allocator"] = _allocator(machine)
    return Around(persistent, low, threads, allocator, why)


def _persistent(choice: TunedChoice) -> tuple[bool, str]:
    if not choice.settings.num_workers:
        return False, say("persistent_workers off: no workers")
    if not choice.bounds.persistent:
        return False, say("persistent_workers off: preset {name}", name=choice.bounds.name)
    return True, say("persistent_workers on: workers are not restarted every epoch")


def _low_memory(measured: Measured, machine: Machine, request: TuneRequest, choice: TunedChoice) -> tuple[bool, str]:
    ram = machine.pool("ram")
    if measured.rows is None:
        return False, say("low_memory off: the dataset has no length")
    if ram is None or ram.free is None:
        return False, say("low_memory off: free RAM is unknown")
    # Every rank keeps it in memory; workers copy pages too when they touch Python objects.
    data = measured.rows * measured.sample_bytes * request.here
    room = int(ram.free * choice.bounds.share)
    figures = {
        "samples": _sample_count(measured.rows), "each": format_size(measured.sample_bytes),
        "ranks": _ranks(request.here), "data": format_size(data), "room": format_size(room),
    }  # fmt: skip
    if data > room:
        return True, say(
            "low_memory on: {samples} × {each} × {ranks} = {data}, more than the {room} of "
            "RAM available: map or stream the data",
            **figures,
        )
    return False, say("low_memory off: {samples} × {each} × {ranks} = {data}, {room} of RAM available", **figures)


def _threads(machine: Machine, choice: TunedChoice) -> tuple[int, str]:
    cores, workers = int(choice.cores), choice.settings.num_workers
    # With a GPU the training process mostly waits; without one it does the work.
    threads = max(1, cores // (workers + 1) if machine.gpus.cards else cores - workers)
    return threads, say(
        "threads {threads}: {cores} cores per rank, {workers} of them for workers",
        threads=threads, cores=cores, workers=min(cores, workers),
    )  # fmt: skip


def _allocator(machine: Machine) -> tuple[str | None, str]:
    if not machine.gpus.cards:
        return None, say("allocator unset: no GPU found")
    if machine.runtime.platform != "linux":
        return None, say("allocator unset: expandable segments need Linux")
    return "expandable_segments:True", say("allocator expandable_segments: reduces fragmentation of GPU memory")


_QUARTER = 4


def levers(measured: Measured, request: TuneRequest, choice: TunedChoice) -> tuple[Lever, ...]:
    """Further options to save memory with these settings."""
    return (*_loader(measured, request, choice), *_samples(measured, request, choice), *_model())


def _need(measured: Measured, request: TuneRequest, candidate: CompleteLoaderSettings) -> Need:
    return need(workload(measured, request, candidate))


def _loader(measured: Measured, request: TuneRequest, choice: TunedChoice) -> Iterator[Lever]:
    candidate = choice.settings
    now = _need(measured, request, candidate)
    if candidate.num_workers:
        saved = now.ram - _need(measured, request, replace(candidate, num_workers=0)).ram
        yield Lever("num_workers", "ram", saved, say("no workers: the training step waits for every batch"))
    if candidate.num_workers and candidate.prefetch_factor > 1:
        saved = now.ram - _need(measured, request, replace(candidate, prefetch_factor=1)).ram
        yield Lever("prefetch_factor", "ram", saved, say("prefetch 1: a slow sample stalls training"))
    if candidate.pin_memory:
        saved = now.ram - _need(measured, request, replace(candidate, pin_memory=False)).ram
        yield Lever("pin_memory", "ram", saved, say("pin_memory off: copies to the GPU are synchronous"))
    if candidate.batch_size % 2 == 0:
        saved = now.ram - _need(measured, request, replace(candidate, batch_size=candidate.batch_size // 2)).ram
        yield Lever(
            "batch_size", "ram", saved, say("half the batch size, twice the accumulation: saves even more GPU memory")
        )


def _samples(measured: Measured, request: TuneRequest, choice: TunedChoice) -> Iterator[Lever]:
    """A quarter less length saves a quarter of the bytes; a quarter off each image side nearly half."""
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
        smaller = replace(measured, tensors=tensors)
        saved = _need(measured, request, choice.settings).ram - _need(smaller, request, choice.settings).ram
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
        choice = _at(climbed.settings, measured, machine, request, choice)
    settings = _settings(measured, machine, request, choice)
    if climbed is not None:
        settings = replace(settings, why={**settings.why, "num_workers": climbed.why})
    if not by_hand:
        return settings
    overridden = settings.override(**by_hand)
    wanted = {name: getattr(overridden, name) for name in overridden.before}
    # Dependent settings follow from the override, not from the settings it replaces.
    around_them = _settings(
        measured, machine, request, _at(_by_hand(choice.settings, wanted), measured, machine, request, choice)
    )
    return replace(
        around_them,
        **wanted,
        why={**around_them.why, **{name: overridden.why[name] for name in wanted}},
        before=overridden.before,
    )


def _at(
    candidate: CompleteLoaderSettings, measured: Measured, machine: Machine, request: TuneRequest, choice: TunedChoice
) -> TunedChoice:
    return replace(
        choice, settings=candidate, ideal=candidate, refused=None, plan=plan_of(measured, machine, request, candidate)
    )


def _settings(measured: Measured, machine: Machine, request: TuneRequest, choice: TunedChoice) -> Settings:
    rest = around(measured, machine, request, choice)
    return Settings(
        batch_size=choice.settings.batch_size,
        accumulation=choice.together // choice.settings.batch_size,
        ranks=request.ranks,
        num_workers=choice.settings.num_workers,
        prefetch_factor=choice.settings.prefetch_factor if choice.settings.num_workers else None,
        persistent_workers=rest.persistent_workers,
        pin_memory=choice.settings.pin_memory,
        low_memory=rest.low_memory,
        threads=rest.threads,
        allocator=rest.allocator,
        loader_kind=request.loader_kind,
        why={**reasons(measured, machine, request, choice), **rest.why},
        levers=levers(measured, request, choice),
        measured=measured,
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
