"""How long a batch takes with so many workers: the figures of a measured dataset, put together.

Covers: seconds from batch to batch, for a loader alone or behind a training step. Does not cover: choosing (choose.py),
taking the figures (loader).

Pure. Of several bounds the slowest counts: the workers' own work, shared among them; the CPU time of everybody on the
cores there are; the process that trains, which receives one batch after the other and runs the step; and what was
seen of real workers that had nothing to do but send.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import log, sqrt

from legroom.model import Measured


@dataclass(frozen=True, slots=True)
class Step:
    """One training step on one batch; no seconds: nothing is known of it, and the loader is to be fast alone."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of it, on the host's cores


def load_seconds(measured: Measured, batch: int) -> float:
    """One batch made in the process itself."""
    return batch * measured.sample_seconds + _collate(measured, batch)


def way_seconds(measured: Measured, batch: int) -> float:
    """What sending one batch from a worker costs, everybody's time together."""
    return sum(_way(measured, batch))


def batch_seconds(
    measured: Measured, batch: int, workers: int, prefetch: int, cores: float, step: Step
) -> float:
    """Seconds from one batch to the next."""
    if workers == 0:
        return load_seconds(measured, batch) + step.seconds
    sending, receiving, idle = _way(measured, batch)
    work = batch * measured.worker_seconds + _collate(measured, batch) + sending
    # A worker asked for one batch at a time stands idle until it is asked for the next.
    cycle = work * (1 + _uneven(measured, batch, workers) / prefetch) + (idle if prefetch == 1 else 0.0)
    computing = (
        batch * measured.cpu_seconds + _collate(measured, batch) + sending + receiving + step.cpu_seconds
    )
    return max(cycle / workers, computing / cores, receiving + step.seconds, _seen(measured, batch, workers))


def _collate(measured: Measured, batch: int) -> float:
    return measured.collate_seconds * batch / measured.batch_size


def _way(measured: Measured, batch: int) -> tuple[float, float, float]:
    """Sending, receiving, idling. Where no worker could be had to measure it, a further copy is taken for each."""
    share = batch / measured.batch_size
    if measured.transport is None:
        return _collate(measured, batch), _collate(measured, batch), 0.0
    way = measured.transport
    # What is fixed about a message does not shrink with the batch: taken whole, which errs on the safe side.
    return way.worker_seconds * share, way.parent_seconds, way.latency_seconds


def _seen(measured: Measured, batch: int, workers: int) -> float:
    """What two real workers took when samples cost nothing; more workers can at best share that."""
    if measured.transport is None:
        return 0.0
    return measured.transport.two_seconds * batch / measured.batch_size * min(1.0, 2 / workers)


def _uneven(measured: Measured, batch: int, workers: int) -> float:
    """By what share the slowest of the workers' batches is late: batches come in order, so all wait for it."""
    if workers < 2:
        return 0.0
    return measured.spread / sqrt(batch) * sqrt(2 * log(workers))
