"""Bytes and seconds of a dataset, from a few samples and one batch through the user's own collate.

Covers: measuring in this process. Does not cover: doing so in a child that may die (apart.py, whose door
``measure_dataset`` is here too), drawing (draw.py), the way from a worker (transport.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from legroom.errors import DatasetFailed, UsageError
from legroom.loader.measure.apart import measure_dataset
from legroom.loader.measure.contents import contents
from legroom.loader.measure.draw import Drawn, draw, is_iterable, length
from legroom.loader.measure.private import free_bytes, idle_worker, private_bytes, start_method
from legroom.loader.tune.clock import Clock
from legroom.loader.tune.transport import Kind, measure_transport
from legroom.model import Measured
from legroom.packages import require
from legroom.words import phrase, say

__all__ = ["FIX", "measure", "measure_dataset"]

FIX = phrase("make dataset[0] and one collated batch work on their own first")
_AGAIN, _SECONDS = 5, 0.25  # a quick collate is timed again, because the first imports and warms up


def measure(
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None = None,
    samples: int = 32,
    seconds: float = 2.0,
    transport: Kind | None = None,
) -> Measured:
    """Draw up to ``samples`` samples, or for ``seconds``, at random places; then collate one batch.

    ``transport`` also measures, with a real worker, what a batch costs on its way through that kind of loader.
    """
    check_batch(batch_size)
    default_collate = require("torch.utils.data", "torch", say("drawing from a dataset")).default_collate
    if collate_fn is None:
        collate_fn = default_collate
    # Where workers are not forked each is an interpreter of its own, with all that this one holds at the most.
    idle = idle_worker() if start_method() == "fork" else private_bytes()
    drawn, rows = _samples(dataset, batch_size, samples, seconds)
    members = [drawn.samples[number % len(drawn.samples)] for number in range(batch_size)]
    batch, collate_seconds = _collated(collate_fn, members)
    found, each = contents(batch), [contents(sample) for sample in drawn.samples]
    sample_bytes = sum(sum(one.tensors) + one.other for one in each) // len(each)
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
        source=_source_words(len(drawn.samples), batch_size),
        batch_size=batch_size,
        samples=len(drawn.samples),
        spread=drawn.spread,
        other_bytes=found.other,
        iterable=is_iterable(dataset),
        unsendable=found.unsendable,
        transport=way,
        process_ram=private_bytes(),
        idle_worker=idle,
        # torch's own collate stacks where the batch travels; another's result is there beside the samples first.
        making=sample_bytes * batch_size + (0 if collate_fn is default_collate else sum(found.storages)),
    )


def check_batch(batch_size: object) -> None:
    """A batch of at least one whole sample, or an error."""
    if not isinstance(batch_size, int) or isinstance(batch_size, bool) or batch_size < 1:
        raise UsageError(
            say("a batch of {size} samples makes no sense", size=batch_size),
            why=say("a batch holds at least one sample"),
            fix=(say("give a whole number from 1 up"),),
        )


def _samples(dataset: Any, batch_size: int, samples: int, seconds: float) -> tuple[Drawn, int | None]:
    try:
        rows = length(dataset)
        drawn = draw(
            dataset, rows, together=batch_size, samples=samples, seconds=seconds, room=free_bytes("legroom")
        )
    except Exception as problem:  # whatever the user's own code raises
        raise _failed(say("drawing a sample from the dataset failed"), problem) from problem
    if not drawn.samples:
        raise DatasetFailed(
            say("the dataset gave no sample"), why=say("its length is {rows}", rows=rows), fix=(say(FIX),)
        )
    return drawn, rows


def _collated(collate_fn: Callable[[Any], Any], members: list[Any]) -> tuple[Any, float]:
    best = float("inf")
    try:
        deadline = time.monotonic() + _SECONDS
        for _ in range(_AGAIN):
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


def _source_words(drawn: int, batch_size: int) -> str:
    if drawn < batch_size:
        return say(
            "one batch through the dataset's own collate, {drawn} samples drawn and repeated to {size}",
            drawn=drawn, size=batch_size,
        )  # fmt: skip
    return say("one batch through the dataset's own collate, {drawn} samples drawn", drawn=drawn)
