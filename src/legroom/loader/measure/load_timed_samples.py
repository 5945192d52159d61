"""Loads a few samples of a dataset, each timed, and counts the bytes in a sample or a batch.

The program's random numbers after a measurement are those that it would have drawn without one.
"""

from __future__ import annotations

import pickle
import random
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

from legroom.loader.measure.import_dataset import is_iterable


@contextmanager
def unchanged_random_state() -> Iterator[None]:
    """Restore the global generators of random, numpy and torch's CPU afterwards.

    A measurement must not change what a seeded run computes. Generators that a dataset owns, and CUDA's, are not
    covered.
    """
    import torch

    numpy = sys.modules.get("numpy")
    plain, tensors = random.getstate(), torch.get_rng_state()
    arrays = numpy.random.get_state() if numpy else None
    try:
        yield
    finally:
        random.setstate(plain)
        torch.set_rng_state(tensors)
        if numpy:
            numpy.random.set_state(arrays)


_MOST_DRAWN = 1 << 16  # indices of an order that is drawn in advance
_SCHEDSTAT = "/proc/thread-self/schedstat"


@dataclass(frozen=True, slots=True)
class Clock:
    """A point in time, or the difference between two: computing, waiting and time on the run queue.

    CPU time is what a core must spend. Any number of workers can wait at once. Time on the run queue, while other
    processes had the core, belongs to the machine and not to the work.
    """

    wall: float
    cpu: float  # of every thread of this process
    queued: float  # time on the run queue while other threads had the core

    @classmethod
    def now(cls) -> Clock:
        queued = _seconds_on_run_queue()
        while True:
            found = cls(time.perf_counter(), time.process_time(), queued)
            queued = _seconds_on_run_queue()
            if queued == found.queued:  # else it waited for a core in between: these do not belong together
                return found

    def since(self, start: Clock) -> Clock:
        return Clock(self.wall - start.wall, self.cpu - start.cpu, self.queued - start.queued)

    @property
    def undisturbed(self) -> float:
        """The time it would have taken on a free core."""
        return max(0.0, self.wall - self.queued)


def _seconds_on_run_queue() -> float:
    """Of this thread; 0 where the system does not tell, and it counts as waiting."""
    try:
        with open(_SCHEDSTAT, "rb") as file:
            return int(file.read().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0


@dataclass(frozen=True, slots=True)
class DrawnSamples:
    """Samples, and the mean time for one of them."""

    samples: list[Any]
    seconds: float = 0.0
    cpu: float = 0.0
    wait: float = 0.0
    spread: float = 0.0  # standard deviation of seconds, as a fraction of their mean


def draw_samples(
    dataset: Any, rows: int | None, *, together: int, samples: int, seconds: float, free: int | None = None
) -> DrawnSamples:
    """Up to ``samples`` samples, or as many as are loaded within ``seconds``; at least one, if there is one.

    The first call opens files and fills caches, so it is not timed unless it is the only one. All samples are kept, so
    no more are loaded than fit in a quarter of ``free`` bytes, judged by the first: measuring must not cause a crash.
    """
    deadline = time.monotonic() + seconds
    drawn: list[Any] = []
    laps: list[tuple[float, int]] = []
    source = _fetches(dataset, rows, together)
    start = Clock.now()
    while len(drawn) < samples and (not drawn or time.monotonic() < deadline):
        if len(laps) == 1:
            if free is not None:
                samples = min(samples, max(1, free // 4 // _mean_bytes(drawn)))
            start = Clock.now()
        before = time.perf_counter()
        some = next(source, None)
        if some is None:
            break
        laps.append((time.perf_counter() - before, len(some)))
        drawn.extend(some)
    passed = Clock.now().since(start)
    timed = laps[1:] or laps
    count = sum(number for _, number in timed)
    if not count:
        return DrawnSamples(drawn)
    each, cpu = passed.undisturbed / count, passed.cpu / count
    walls = [wall / number for wall, number in timed if number]
    spread = statistics.pstdev(walls) / statistics.fmean(walls) if sum(walls) else 0.0
    return DrawnSamples(drawn, each, cpu, max(0.0, each - cpu), spread)


def _mean_bytes(drawn: list[Any]) -> int:
    found = [contents_of(sample) for sample in drawn]
    return max(1, sum(sum(one.tensors) + one.other for one in found) // len(found))


def _fetches(dataset: Any, rows: int | None, together: int) -> Iterator[Sequence[Any]]:
    """Samples as torch's fetcher loads them: whole batches with ``__getitems__``, else one by one."""
    if is_iterable(dataset) or rows is None:
        for sample in islice(iter(dataset), _MOST_DRAWN):
            yield [sample]
        return
    # Without replacement while there are indices left: a repeated sample would come from a cache.
    order = random.Random(0).sample(range(rows), min(rows, _MOST_DRAWN))
    if not hasattr(dataset, "__getitems__"):
        for index in order:
            yield [dataset[index]]
        return
    for start in range(0, len(order), together):
        yield dataset.__getitems__(order[start : start + together])


@dataclass(frozen=True, slots=True)
class Contents:
    """Bytes in one object."""

    tensors: tuple[int, ...]  # of each tensor
    storages: tuple[int, ...]  # of each storage behind them, once: a view is sent with its whole storage
    other: int  # pickled
    unsendable: str | None  # why it cannot be pickled; then the figures are what was found until there


def contents_of(thing: object) -> Contents:
    """The bytes of every tensor in ``thing``, in any class, and of the rest.

    A worker sends a batch by pickling it, so pickling finds exactly the tensors that a loader sends.
    """
    import torch

    sink = _ByteCounter()
    finder = _TensorFinder(sink, torch.Tensor)
    unsendable = None
    try:
        finder.dump(thing)
    except Exception as problem:  # any exception of a class's own __reduce__
        unsendable = f"{type(problem).__name__}: {problem}"
    storages: dict[int, int] = {}
    for tensor in finder.found:
        if tensor.layout is torch.strided:
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        else:  # sparse
            storages[id(tensor)] = _tensor_bytes(tensor)
    return Contents(
        tensors=tuple(_tensor_bytes(tensor) for tensor in finder.found),
        storages=tuple(size for size in storages.values() if size),
        other=sink.total,
        unsendable=unsendable,
    )


def _tensor_bytes(tensor: Any) -> int:
    import torch

    if tensor.layout is torch.strided:
        return int(tensor.nbytes)
    if tensor.layout is torch.sparse_coo:
        whole = tensor.coalesce()
        return int(whole.indices().nbytes + whole.values().nbytes)
    return int(tensor.values().nbytes)


class _ByteCounter:
    """A file that only counts the bytes written to it."""

    total = 0

    def write(self, data: Any) -> int:
        size = memoryview(data).nbytes
        self.total += size
        return size


class _TensorFinder(pickle.Pickler):
    def __init__(self, sink: _ByteCounter, tensor: type) -> None:
        super().__init__(sink, pickle.HIGHEST_PROTOCOL)
        self._tensor = tensor
        self.found: list[Any] = []

    def persistent_id(self, thing: Any) -> int | None:
        if not isinstance(thing, self._tensor):
            return None
        self.found.append(thing)
        return len(self.found)
