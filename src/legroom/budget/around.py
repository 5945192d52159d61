"""The settings around the loader: data mode, worker lifetime, threads, the CUDA allocator.

Covers: each with its line. Does not cover: the loader's own (choose.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from legroom.budget.choose import Ask, Choice
from legroom.model import Box, Measured
from legroom.units import format_size
from legroom.words import say


@dataclass(frozen=True, slots=True)
class Around:
    """Values and their reasons."""

    persistent_workers: bool
    low_memory: bool
    threads: int
    allocator: str | None
    why: dict[str, str]


def around(measured: Measured, box: Box, ask: Ask, choice: Choice) -> Around:
    """What goes with that choice on this box."""
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
