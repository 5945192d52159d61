"""Measures a dataset in this process: bytes and seconds of a few samples and of one collated batch."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import ceil
from typing import Any

from legroom.errors import DatasetFailed
from legroom.loader.measure.dataloader_throughput import measure_transport
from legroom.loader.measure.import_dataset import is_iterable, length
from legroom.loader.measure.load_timed_samples import Clock, Contents, DrawnSamples, contents_of, draw_samples
from legroom.loader.measure_process_memory import free_bytes, idle_worker, private_bytes, start_method
from legroom.messages import counted, phrase, say
from legroom.records.loader_settings_and_flags import LoaderKind
from legroom.records.workload import Measured
from legroom.system.argument_checks import check_integer
from legroom.system.lazy_and_optional_imports import require

FIX = phrase("first make dataset[0] and one collated batch work by themselves")
_ENOUGH = 256 << 20  # bytes of a collated batch: larger ones are extrapolated
# A fast collate is timed again. The first calls import modules. They also fault in the pages of the batch, until malloc
# keeps what a batch frees: for 768 KB that takes ten times as long as copying it.
_REPEATS, _WARM_S, _COLLATE_S = 5, 0.02, 0.25


def measure(
    dataset: Any,
    *,
    batch_size: int,
    collate_fn: Callable[[Any], Any] | None = None,
    samples: int = 32,
    seconds: float = 2.0,
    transport: LoaderKind | None = None,
    method: str | None = None,
    rows: int | None = None,
    settings: Mapping[str, Any] | None = None,
) -> Measured:
    """Load up to ``samples`` samples at random indices, or for ``seconds``, and collate them.

    As many are collated as a batch has and as fit in a quarter of the free memory; a larger batch is extrapolated.
    ``transport`` also measures, with a real worker, what it costs to send a batch through that kind of loader.
    ``method`` is the start method of workers; None: Python's default. ``rows`` is the number of samples in an epoch, if
    not all of the dataset; ``settings`` those of the DataLoader that the dataset was given as.
    """
    batch_size = check_integer("batch_size", batch_size, 1)
    default_collate = require("torch.utils.data", "torch", phrase("measuring a dataset")).default_collate
    if collate_fn is None:
        collate_fn = default_collate
    # A worker that is not forked is a new interpreter, which holds at most what this one holds.
    idle = idle_worker() if (method or start_method()) == "fork" else private_bytes()
    free = free_bytes("legroom")
    drawn, all_rows = _samples(dataset, batch_size, samples, seconds, free)
    each = [contents_of(sample) for sample in drawn.samples]
    sample_bytes = sum(sum(one.tensors) + one.other for one in each) // len(each)
    members, found, collate_seconds, grows = _collated(collate_fn, drawn.samples, batch_size, free)
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
        rows=all_rows if rows is None else rows,
        loader=settings,
        source=_source_text(len(drawn.samples), len(members), batch_size),
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
        # default_collate stacks in the memory that is sent; the result of another is in private memory first.
        making=sample_bytes * len(members) + (0 if collate_fn is default_collate else sum(found.storages)),
    )


def _samples(
    dataset: Any, batch_size: int, samples: int, seconds: float, free: int | None
) -> tuple[DrawnSamples, int | None]:
    try:
        rows = length(dataset)
        drawn = draw_samples(
            dataset, rows, together=min(batch_size, samples), samples=samples, seconds=seconds, free=free
        )
    except Exception as problem:  # any exception of the user's code
        raise _failed(say("loading a sample of the dataset failed"), problem) from problem
    if not drawn.samples:
        raise DatasetFailed(
            say("the dataset has no samples"), why=say("its length is {rows}", rows=rows), fix=(say(FIX),)
        )
    return drawn, rows


def _collated(
    collate_fn: Callable[[Any], Any], samples: list[Any], batch_size: int, free: int | None
) -> tuple[list[Any], Contents, float, bool]:
    """Collate one sample, two, four, and so on up to a batch, while the double fits easily in the free memory.

    Returns the members of the last batch, its contents and seconds, and whether more samples make more tensors. If
    fewer were loaded, samples are repeated; a repeated sample is counted as if it were another one.
    """
    size, unlike, grows = 1, None, False
    while True:
        members = [samples[number % len(samples)] for number in range(size)]
        last = size >= batch_size
        try:
            batch, seconds = _timed(collate_fn, members, again=last)
        except DatasetFailed:
            if last:
                raise
            size = min(2 * size, batch_size)  # it may need pairs, or more
            continue
        found = contents_of(batch)
        del batch
        if size <= len(samples):
            grows = unlike is not None and len(found.storages) > len(unlike.storages)
            unlike = found
        elif unlike is not None:
            found = _as_if_unlike(found, unlike, size / len(samples), grows=grows)
        so_far = sum(found.storages) + found.other
        if last or so_far > _ENOUGH or (free is not None and 4 * so_far > free // 4):
            return members, found, seconds, grows
        # All loaded samples are collated together once; beyond that they repeat.
        size = min(2 * size, batch_size, len(samples)) if size < len(samples) else min(2 * size, batch_size)


def _as_if_unlike(found: Contents, unlike: Contents, times: float, *, grows: bool) -> Contents:
    """The contents of a batch with repeated members, as if these were different samples."""
    other = ceil(unlike.other * times)
    if not grows:
        return replace(found, other=other)
    storages, tensors = (
        tuple(itertools.islice(itertools.cycle(sizes), ceil(len(sizes) * times)))
        for sizes in (unlike.storages, unlike.tensors)
    )
    return Contents(tensors, storages, other, found.unsendable)


def _timed(collate_fn: Callable[[Any], Any], members: list[Any], *, again: bool) -> tuple[Any, float]:
    """A batch, and the seconds that it takes. ``again``: the shortest of several times."""
    best, start = float("inf"), time.monotonic()
    try:
        for count in itertools.count(1):
            batch = None  # freed, so that the next one reuses the memory, as in a loop
            before = Clock.now()
            batch = collate_fn(members)
            best = min(best, Clock.now().since(before).undisturbed)
            if not again or time.monotonic() - start > (_WARM_S if count >= _REPEATS else _COLLATE_S):
                break
    except Exception as problem:  # any exception of the user's code
        raise _failed(say("collating {samples} failed", samples=_count(len(members))), problem) from problem
    return batch, best


def _failed(what: str, problem: Exception) -> DatasetFailed:
    why = say("{kind}: {text}", kind=type(problem).__name__, text=problem)
    return DatasetFailed(what, why=why, fix=(say(FIX),))


def _source_text(drawn: int, collated: int, batch_size: int) -> str:
    if collated < batch_size:
        return say(
            "measured: {samples} collated together, extrapolated to {size}",
            samples=_count(collated), size=batch_size,
        )  # fmt: skip
    if drawn < batch_size:
        return say(
            "measured: one collated batch, {samples} repeated to {size}",
            samples=_count(drawn), size=batch_size,
        )  # fmt: skip
    return say("measured: one collated batch, {samples} loaded", samples=_count(drawn))


def _count(samples: int) -> str:
    return counted(samples, phrase("{count} sample"), phrase("{count} samples"))
