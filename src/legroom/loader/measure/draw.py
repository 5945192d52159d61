"""A few samples drawn from a dataset, each timed.

Covers: map-style, batched (``__getitems__``) and iterable datasets. Does not cover: collating, bytes.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from legroom.loader.measure.clock import Clock
from legroom.loader.measure.contents import contents

_MOST = 1 << 16  # of an order drawn up in advance


@dataclass(frozen=True, slots=True)
class Drawn:
    """Samples, and what one of them took on average."""

    samples: list[Any]
    seconds: float = 0.0
    cpu: float = 0.0
    wait: float = 0.0
    spread: float = 0.0  # standard deviation of seconds, as a share of their mean


def draw(
    dataset: Any, rows: int | None, *, together: int, samples: int, seconds: float, room: int | None = None
) -> Drawn:
    """Up to ``samples`` samples, or as many as come within ``seconds``; at least one, if there is one.

    The first draw opens files and fills caches: it warms up and is not timed, unless it is the only one. No more are
    drawn than take a quarter of ``room`` bytes, going by the first: all are kept, and looking must not be the crash.
    """
    deadline = time.monotonic() + seconds
    drawn: list[Any] = []
    laps: list[tuple[float, int]] = []
    source = _source(dataset, rows, together)
    start = Clock.now()
    while len(drawn) < samples and (not drawn or time.monotonic() < deadline):
        if len(laps) == 1:
            if room is not None:
                samples = min(samples, max(1, room // 4 // _size(drawn)))
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
        return Drawn(drawn)
    each, cpu = passed.undisturbed / count, passed.cpu / count
    walls = [wall / number for wall, number in timed if number]
    spread = statistics.pstdev(walls) / statistics.fmean(walls) if sum(walls) else 0.0
    return Drawn(drawn, each, cpu, max(0.0, each - cpu), spread)


def _size(drawn: list[Any]) -> int:
    """Bytes of one of them, on average."""
    found = [contents(sample) for sample in drawn]
    return max(1, sum(sum(one.tensors) + one.other for one in found) // len(found))


def length(dataset: Any) -> int | None:
    """Samples in the dataset, or None where it does not say."""
    try:
        return len(dataset)
    except (TypeError, NotImplementedError):
        return None
    except Exception:
        if is_iterable(dataset):  # a loader never asks it
            return None
        raise


def is_iterable(dataset: Any) -> bool:
    """Whether it can only be walked: torch's own kind has a ``__getitem__`` too, which raises."""
    from torch.utils.data import IterableDataset

    if isinstance(dataset, IterableDataset):
        return True
    return not hasattr(dataset, "__getitem__") and not hasattr(dataset, "__getitems__")


def _source(dataset: Any, rows: int | None, together: int) -> Iterator[Sequence[Any]]:
    """Samples as a fetcher draws them: whole batches where the dataset gives batches, else one by one."""
    if is_iterable(dataset) or rows is None:
        for sample in islice(iter(dataset), _MOST):
            yield [sample]
        return
    # Without replacement while there are rows left: a sample met again would come from a cache.
    order = random.Random(0).sample(range(rows), min(rows, _MOST))
    if not hasattr(dataset, "__getitems__"):
        for index in order:
            yield [dataset[index]]
        return
    for start in range(0, len(order), together):
        yield dataset.__getitems__(order[start : start + together])
