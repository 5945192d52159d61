"""Complete settings from a recommendation, with one reason per setting and the further options a person has.

Also the settings around the DataLoader: data mode, persistent workers, threads, the CUDA allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from legroom.advice.memory_need import need
from legroom.advice.recommend import Ask, Choice, Climbed, Rung, choose, most_workers, pace, plan_of, workload
from legroom.records import Box, Lever, Measured, Need, Plan, Settings
from legroom.units import format_size
from legroom.words import joined, phrase, say


def milliseconds(seconds: float) -> str:
    """Three figures: ``0.412 ms``, ``11.2 ms``, ``1200 ms``."""
    value = seconds * 1000
    digits = 3 if value < 1 else 2 if value < 10 else 1 if value < 100 else 0
    return f"{value:.{digits}f} ms"


def reasons(measured: Measured, box: Box, ask: Ask, choice: Choice) -> dict[str, str]:
    """Why each setting is what it is."""
    rung = choice.rung
    lines = {
        "batch_size": _batch(measured, ask, choice),
        "accumulation": _accumulation(ask, choice),
        "num_workers": _workers(measured, ask, choice),
    }
    if rung.workers:
        lines["prefetch_factor"] = _prefetch(measured, choice)
    lines["pin_memory"] = _pin(box, choice)
    return lines


def _batch(measured: Measured, ask: Ask, choice: Choice) -> str:
    batch = choice.rung.batch
    if batch == ask.batch_size:
        return say("batch {batch}: as asked for, {size}", batch=batch, size=_batch_bytes(measured, batch))
    return say(
        "batch {batch} instead of {asked}: {problem}",
        batch=batch, asked=ask.batch_size, problem=_problem(choice.refused),
    )  # fmt: skip


def _batch_bytes(measured: Measured, batch: int) -> str:
    return format_size(measured.batch_bytes * batch // measured.batch_size)


def _accumulation(ask: Ask, choice: Choice) -> str:
    batch, steps = choice.rung.batch, choice.together // choice.rung.batch
    return say(
        "accumulation {steps}: {batch} × {steps} × {ranks} ranks = {effective} samples an optimizer step, kept",
        steps=steps, batch=batch, ranks=ask.ranks, effective=batch * steps * ask.ranks,
    )  # fmt: skip


def _workers(measured: Measured, ask: Ask, choice: Choice) -> str:
    rung, ideal = choice.rung, choice.ideal
    if measured.unsendable is not None:
        return say("workers 0: a batch cannot be sent from a worker ({why})", why=measured.unsendable)
    if rung.workers < ideal.workers:
        return say(
            "workers {workers}: {ideal} would be faster, but {problem}",
            workers=rung.workers, ideal=ideal.workers, problem=_problem(choice.refused),
        )  # fmt: skip
    if not rung.workers:
        return _no_workers(measured, ask, choice)
    sample = milliseconds(measured.worker_seconds)
    if ask.step.seconds:
        head = say(
            "workers {workers}: {sample} a sample against a {step} step of {batch}",
            workers=rung.workers, sample=sample, step=milliseconds(ask.step.seconds), batch=rung.batch,
        )  # fmt: skip
    else:
        head = say("workers {workers}: {sample} a sample", workers=rung.workers, sample=sample)
    return joined((head, _why_no_more(measured, ask, choice)))


def _no_workers(measured: Measured, ask: Ask, choice: Choice) -> str:
    here = milliseconds(pace(measured, choice.rung, choice.cores, ask.step))
    most, bound = most_workers(measured, ask, choice.cores, choice.bounds)
    if not most:
        return say("workers 0: {why}", why=_bound(bound, measured, choice))
    one = milliseconds(pace(measured, replace(choice.rung, workers=1, prefetch=2), choice.cores, ask.step))
    return say("workers 0: a batch every {here} without, every {one} through a worker", here=here, one=one)


_BOUNDS = {
    "cores": phrase("one more would find no core: there are {cores:g} for each rank"),
    "waiting": phrase("{share:.0%} of it is waiting, and four workers a core are the most that is tried"),
    "iterable": phrase("an iterable dataset gives every worker all of it unless it shards itself"),
    "preset": phrase("the preset allows no more"),
    "batches": phrase("an epoch has no more batches"),
    "most": phrase("more are not tried"),
    "unsendable": phrase("a batch cannot be sent from a worker"),
}


def _bound(name: str, measured: Measured, choice: Choice) -> str:
    share = measured.wait_seconds / measured.sample_seconds if measured.sample_seconds else 0.0
    return say(_BOUNDS[name], cores=choice.cores, share=share)


def _why_no_more(measured: Measured, ask: Ask, choice: Choice) -> str:
    rung = choice.rung
    most, bound = most_workers(measured, ask, choice.cores, choice.bounds)
    if rung.workers >= most:
        return _bound(bound, measured, choice)
    now = pace(measured, rung, choice.cores, ask.step)
    more = pace(measured, replace(rung, workers=rung.workers + 1), choice.cores, ask.step)
    if ask.step.seconds and now <= ask.step.seconds * 1.05:
        return say("one more would idle")
    return say("one more would gain {share:.0%}", share=max(0.0, 1 - more / now))


def _prefetch(measured: Measured, choice: Choice) -> str:
    rung = choice.rung
    if rung.prefetch < choice.ideal.prefetch:
        return say(
            "prefetch {prefetch}: {ideal} would even out the samples' times, but {problem}",
            prefetch=rung.prefetch, ideal=choice.ideal.prefetch, problem=_problem(choice.refused),
        )  # fmt: skip
    idle = measured.transport.latency_seconds if measured.transport else 0.0
    return say(
        "prefetch {prefetch}: a sample's time varies by {spread:.0%}, a worker asked anew idles {idle}; "
        "{flights} batches in flight",
        prefetch=rung.prefetch, spread=measured.spread, idle=milliseconds(idle),
        flights=rung.workers * rung.prefetch,
    )  # fmt: skip


def _pin(box: Box, choice: Choice) -> str:
    if not box.gpus.cards:
        return say("pin_memory off: no GPU seen")
    if not choice.rung.pin and choice.refused is None:
        return say("pin_memory off: set so")
    if not choice.rung.pin:
        return say("pin_memory off: it takes host RAM, and {problem}", problem=_problem(choice.refused))
    return say(
        "pin_memory on: {size} of host RAM, none of /dev/shm", size=format_size(choice.plan.need.pinned)
    )


def _problem(plan: Plan | None) -> str:
    if plan is None or not plan.problems:
        return say("it does not fit")
    return plan.problems[0].message


@dataclass(frozen=True, slots=True)
class Around:
    """Values and their reasons."""

    persistent_workers: bool
    low_memory: bool
    threads: int
    allocator: str | None
    why: dict[str, str]


def around(measured: Measured, box: Box, ask: Ask, choice: Choice) -> Around:
    """The settings around the DataLoader that go with that choice on this machine."""
    why: dict[str, str] = {}
    persistent, why["persistent_workers"] = _persistent(choice)
    low, why["low_memory"] = _low_memory(measured, box, ask, choice)
    threads, why["threads"] = _threads(box, choice)
    allocator, why["allocator"] = _allocator(box)
    return Around(persistent, low, threads, allocator, why)


def _persistent(choice: Choice) -> tuple[bool, str]:
    if not choice.rung.workers:
        return False, say("persistent_workers off: no workers")
    if not choice.bounds.persistent:
        return False, say("persistent_workers off: preset {name}", name=choice.bounds.name)
    return True, say("persistent_workers on: they need not start anew every epoch")


def _low_memory(measured: Measured, box: Box, ask: Ask, choice: Choice) -> tuple[bool, str]:
    ram = box.pool("ram")
    if measured.rows is None:
        return False, say("low_memory off: the dataset does not say how many samples it has")
    if ram is None or ram.free is None:
        return False, say("low_memory off: free RAM is unknown")
    # Held in memory by every rank; workers come to hold copies too as they touch Python objects.
    data = measured.rows * measured.sample_bytes * ask.here
    room = int(ram.free * choice.bounds.share)
    figures = {
        "rows": measured.rows, "each": format_size(measured.sample_bytes), "ranks": ask.here,
        "data": format_size(data), "room": format_size(room),
    }  # fmt: skip
    if data > room:
        return True, say(
            "low_memory on: {rows} samples of {each} × {ranks} ranks are {data}, and {room} of RAM may be taken: "
            "map or stream them",
            **figures,
        )
    return False, say(
        "low_memory off: {rows} samples of {each} × {ranks} ranks are {data} of {room}", **figures
    )


def _threads(box: Box, choice: Choice) -> tuple[int, str]:
    cores, workers = int(choice.cores), choice.rung.workers
    # With a GPU the process that trains mostly waits; without one it is where the work is done.
    threads = max(1, cores // (workers + 1) if box.gpus.cards else cores - workers)
    return threads, say(
        "threads {threads}: {cores} cores for each rank, {workers} of them for workers",
        threads=threads, cores=cores, workers=min(cores, workers),
    )  # fmt: skip


def _allocator(box: Box) -> tuple[str | None, str]:
    if not box.gpus.cards:
        return None, say("allocator unset: no GPU seen")
    if box.place.platform != "linux":
        return None, say("allocator unset: expandable segments need Linux")
    return "expandable_segments:True", say(
        "allocator expandable_segments: blocks that grow instead of fragments that cannot be joined"
    )


_QUARTER = 4


def levers(measured: Measured, ask: Ask, choice: Choice) -> tuple[Lever, ...]:
    """Every lever that is left at these settings."""
    return (*_loader(measured, ask, choice), *_samples(measured, ask, choice), *_model())


def _need(measured: Measured, ask: Ask, rung: Rung) -> Need:
    return need(workload(measured, ask, rung))


def _loader(measured: Measured, ask: Ask, choice: Choice) -> Iterator[Lever]:
    rung = choice.rung
    now = _need(measured, ask, rung)
    if rung.workers:
        saved = now.ram - _need(measured, ask, replace(rung, workers=0)).ram
        yield Lever("num_workers", "ram", saved, say("no workers: the training waits for every batch"))
    if rung.workers and rung.prefetch > 1:
        saved = now.ram - _need(measured, ask, replace(rung, prefetch=1)).ram
        yield Lever("prefetch_factor", "ram", saved, say("prefetch 1: nothing evens out a slow sample"))
    if rung.pin:
        saved = now.ram - _need(measured, ask, replace(rung, pin=False)).ram
        yield Lever("pin_memory", "ram", saved, say("pin_memory off: copies to the GPU wait for the host"))
    if rung.batch % 2 == 0:
        saved = now.ram - _need(measured, ask, replace(rung, batch=rung.batch // 2)).ram
        yield Lever(
            "batch_size",
            "ram",
            saved,
            say("half the batch, twice the accumulation: on the GPU it saves more"),
        )


def _samples(measured: Measured, ask: Ask, choice: Choice) -> Iterator[Lever]:
    """A quarter off a sample's length is a quarter of its bytes, of an image's side nearly half."""
    largest = max(measured.tensors, default=0)
    if not largest:
        return
    rest = tuple(size for size in measured.tensors if size != largest)
    for name, kept, what in (
        (
            "sequence_length",
            1 - 1 / _QUARTER,
            say("a quarter shorter, where the largest tensor grows with it"),
        ),
        (
            "image_size",
            (1 - 1 / _QUARTER) ** 2,
            say("a quarter off each side, where the largest tensor is the image"),
        ),
    ):
        smaller = replace(measured, tensors=(int(largest * kept), *rest))
        saved = _need(measured, ask, choice.rung).ram - _need(smaller, ask, choice.rung).ram
        yield Lever(name, "ram", max(0, saved), what)


def _model() -> Iterator[Lever]:
    yield Lever(
        "mixed_precision",
        "gpu",
        None,
        say("bfloat16 activations: about half of theirs, which were not measured"),
    )
    yield Lever(
        "activation_checkpointing",
        "gpu",
        None,
        say("activations computed again: their bytes were not measured"),
    )


def settle(
    measured: Measured,
    box: Box,
    ask: Ask,
    by_hand: Mapping[str, Any] | None = None,
    climbed: Climbed | None = None,
) -> Settings:
    """The settings for this dataset on this machine; ``by_hand`` overrides, setting by setting."""
    choice = choose(measured, box, ask)
    if climbed is not None:
        choice = _at(climbed.rung, measured, box, ask, choice)
    settings = _settings(measured, box, ask, choice)
    if climbed is not None:
        settings = replace(settings, why={**settings.why, "num_workers": climbed.why})
    if not by_hand:
        return settings
    overridden = settings.override(**by_hand)
    wanted = {name: getattr(overridden, name) for name in overridden.before}
    # What goes with settings set by hand is chosen for those, not for the ones they replace.
    around_them = _settings(
        measured, box, ask, _at(_by_hand(choice.rung, wanted), measured, box, ask, choice)
    )
    return replace(
        around_them,
        **wanted,
        why={**around_them.why, **{name: overridden.why[name] for name in wanted}},
        before=overridden.before,
    )


def _at(rung: Rung, measured: Measured, box: Box, ask: Ask, choice: Choice) -> Choice:
    return replace(choice, rung=rung, ideal=rung, refused=None, plan=plan_of(measured, box, ask, rung))


def _settings(measured: Measured, box: Box, ask: Ask, choice: Choice) -> Settings:
    rest = around(measured, box, ask, choice)
    return Settings(
        batch_size=choice.rung.batch,
        accumulation=choice.together // choice.rung.batch,
        ranks=ask.ranks,
        num_workers=choice.rung.workers,
        prefetch_factor=choice.rung.prefetch if choice.rung.workers else None,
        persistent_workers=rest.persistent_workers,
        pin_memory=choice.rung.pin,
        low_memory=rest.low_memory,
        threads=rest.threads,
        allocator=rest.allocator,
        loader_kind=ask.loader_kind,
        why={**reasons(measured, box, ask, choice), **rest.why},
        levers=levers(measured, ask, choice),
        measured=measured,
        plan=choice.plan,
    )


def _by_hand(rung: Rung, wanted: Mapping[str, Any]) -> Rung:
    return Rung(
        batch=wanted.get("batch_size", rung.batch),
        workers=wanted.get("num_workers", rung.workers),
        prefetch=wanted.get("prefetch_factor", rung.prefetch),
        pin=wanted.get("pin_memory", rung.pin),
    )


def changes(before: Settings, after: Settings) -> dict[str, str]:
    """Setting by setting, what is no longer as it was, with the new reason."""
    old, new = before.values(), after.values()
    return {
        name: say(
            "{name} {old} → {new} ({why})",
            name=name,
            old=old[name],
            new=new[name],
            why=after.why.get(name, ""),
        )
        for name in new
        if old[name] != new[name]
    }
