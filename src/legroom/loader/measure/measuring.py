"""Bytes and seconds of a dataset, from a few samples and one batch through the user's own collate.

Covers: measuring in this process. Does not cover: doing so in a child that may die (apart.py, whose door
``measure_dataset`` is here too), drawing (draw.py), the way from a worker (transport.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from itertools import cycle, islice
from math import ceil
from typing import Any

from legroom.errors import DatasetFailed
from legroom.loader.measure.apart import measure_dataset
from legroom.loader.measure.clock import Clock
from legroom.loader.measure.contents import Contents, contents
from legroom.loader.measure.draw import Drawn, draw, is_iterable, length
from legroom.loader.measure.private import free_bytes, idle_worker, private_bytes, start_method
from legroom.loader.measure.transport import LoaderKind, measure_transport
from legroom.records import Measured
from legroom.system.argument_checks import check_integer
from legroom.system.imports import require
from legroom.words import phrase, say

__all__ = ["FIX", "measure", "measure_dataset"]

FIX = phrase("make dataset[0] and one collated batch work on their own first")
_ENOUGH = 256 << 20  # bytes of a collated batch: a larger one follows in proportion
_AGAIN, _SECONDS = 5, 0.25  # a quick collate is timed again, because the first imports and warms up


def measure(
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None = None,
    samples: int = 32,
    seconds: float = 2.0,
    transport: LoaderKind | None = None,
    method: str | None = None,
) -> Measured:
    """Draw up to ``samples`` samples, or for ``seconds``, at random places; then collate them.

    As many are collated as a batch has and a quarter of the free memory holds; what a larger batch takes follows in
    proportion. ``transport`` also measures, with a real worker, what a batch costs on its way through that kind of
    loader. ``method`` is how workers will start; None: as this Python starts them.
    """
    batch_size = check_integer("batch_size", batch_size, 1)
    default_collate = require("torch.utils.data", "torch", say("drawing from a dataset")).default_collate
    if collate_fn is None:
        collate_fn = default_collate
    # Where workers are not forked each is an interpreter of its own, with all that this one holds at the most.
    idle = idle_worker() if (method or start_method()) == "fork" else private_bytes()
    room = free_bytes("legroom")
    drawn, rows = _samples(dataset, batch_size, samples, seconds, room)
    each = [contents(sample) for sample in drawn.samples]
    sample_bytes = sum(sum(one.tensors) + one.other for one in each) // len(each)
    members, found, collate_seconds, grows = _collated(collate_fn, drawn.samples, batch_size, room)
    way = None
    if transport is not None and found.unsendable is None:
        way = measure_transport(members, collate_fn, transport, sum(found.storages), collate_seconds)
    return Measured(
        tensors=found.storages,
        sample_bytes=sample_bytes,
        sample_seconds=drawn.seconds,
        cpu_seconds=drawn.cpu,
        wait_seconds=drawn.wait,
        collate_seconds=collate_seconds,
        rows=rows,
        source=_source_words(len(drawn.samples), len(members), batch_size),
        batch_size=len(members),
        each=grows,
        samples=len(drawn.samples),
        spread=drawn.spread,
        other_bytes=found.other,
        iterable=is_iterable(dataset),
        unsendable=found.unsendable,
        transport=way,
        process_ram=private_bytes(),
        idle_worker=idle,
        # torch's own collate stacks where the batch travels; another's result is there beside the samples first.
        making=sample_bytes * len(members) + (0 if collate_fn is default_collate else sum(found.storages)),
    )


def _samples(
    dataset: Any, batch_size: int, samples: int, seconds: float, room: int | None
) -> tuple[Drawn, int | None]:
    try:
        rows = length(dataset)
        drawn = draw(
            dataset, rows, together=min(batch_size, samples), samples=samples, seconds=seconds, room=room
        )
    except Exception as problem:  # whatever the user's own code raises
        raise _failed(say("drawing a sample from the dataset failed"), problem) from problem
    if not drawn.samples:
        raise DatasetFailed(
            say("the dataset gave no sample"), why=say("its length is {rows}", rows=rows), fix=(say(FIX),)
        )
    return drawn, rows


def _collated(
    collate_fn: Callable[[Any], Any], samples: list[Any], batch_size: int, room: int | None
) -> tuple[list[Any], Contents, float, bool]:
    """Collate one sample, two, four, and so on up to a batch, while twice as much takes little of the room.

    The members of the last batch, its contents and seconds, and whether more samples make more tensors. Samples are
    repeated where fewer were drawn; what a repeated sample brings is counted as if it were another one.
    """
    size, unlike, grows = 1, None, False
    while True:
        members = [samples[number % len(samples)] for number in range(size)]
        last = size >= batch_size
        try:
            batch, seconds = _timed(collate_fn, members, _AGAIN if last else 1)
        except DatasetFailed:
            if last:
                raise
            size = min(2 * size, batch_size)  # it may want pairs, or more of them
            continue
        found = contents(batch)
        del batch
        if size <= len(samples):
            grows = unlike is not None and len(found.storages) > len(unlike.storages)
            unlike = found
        elif unlike is not None:
            found = _as_if_unlike(found, unlike, size / len(samples), grows=grows)
        so_far = sum(found.storages) + found.other
        if last or so_far > _ENOUGH or (room is not None and 4 * so_far > room // 4):
            return members, found, seconds, grows
        # All that were drawn are collated together once: beyond that they repeat.
        size = min(2 * size, batch_size, len(samples)) if size < len(samples) else min(2 * size, batch_size)


def _as_if_unlike(found: Contents, unlike: Contents, times: float, *, grows: bool) -> Contents:
    """Of a batch with repeated members: tensors and pickled objects that it holds once count each time."""
    other = ceil(unlike.other * times)
    if not grows:
        return replace(found, other=other)
    storages, tensors = (
        tuple(islice(cycle(sizes), ceil(len(sizes) * times))) for sizes in (unlike.storages, unlike.tensors)
    )
    return Contents(tensors, storages, other, found.unsendable)


def _timed(collate_fn: Callable[[Any], Any], members: list[Any], times: int) -> tuple[Any, float]:
    best = float("inf")
    try:
        deadline = time.monotonic() + _SECONDS
        for _ in range(times):
            batch = None  # given back, so that the next finds warm memory, as it will in a loop
            before = Clock.now()
            batch = collate_fn(members)
            best = min(best, Clock.now().since(before).undisturbed)
            if time.monotonic() > deadline:
                break
    except Exception as problem:  # whatever the user's own code raises
        raise _failed(say("collating {count} samples failed", count=len(members)), problem) from problem
    return batch, best


def _failed(what: str, problem: Exception) -> DatasetFailed:
    why = say("{kind}: {text}", kind=type(problem).__name__, text=problem)
    return DatasetFailed(what, why=why, fix=(say(FIX),))


def _source_words(drawn: int, collated: int, batch_size: int) -> str:
    if collated < batch_size:
        return say(
            "{collated} samples through the dataset's own collate, in proportion for {size}",
            collated=collated, size=batch_size,
        )  # fmt: skip
    if drawn < batch_size:
        return say(
            "one batch through the dataset's own collate, {drawn} samples drawn and repeated to {size}",
            drawn=drawn, size=batch_size,
        )  # fmt: skip
    return say("one batch through the dataset's own collate, {drawn} samples drawn", drawn=drawn)
