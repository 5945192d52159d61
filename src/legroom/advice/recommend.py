"""DataLoader settings for a measured dataset: fast enough, with the least memory, same effective batch size.

Presets bound the share of free memory and the number of workers. `--climb` raises settings step by step in real runs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from math import log, sqrt
from typing import Literal

from legroom.advice.fit import fit, per_rank, smaller_batches
from legroom.advice.memory_need import need
from legroom.advice.safe_settings import usable_cores
from legroom.errors import UsageError
from legroom.records import Box, Loader, Measured, Plan, Workload
from legroom.words import joined, listed, say

_SHARED = ("shm", "ram", "pinned")  # what others take from as well


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds for a choice."""

    name: str
    share: float  # of what each pool has free now
    most_workers: int | None = None  # None: as many as pay
    persistent: bool = True


# A fifth stays for kept batches and for others.
DEFAULT = Preset("none", 0.8)
PRESETS = {
    # Starts and stops quickly beside an editor and a browser.
    "development": Preset("development", 0.25, most_workers=1, persistent=False),
    # A long run meets peaks that a short measurement does not.
    "production": Preset("production", 0.6),
    # The scheduler's limit is this job's alone.
    "cluster": Preset("cluster", 0.9),
}


def preset(name: str | None) -> Preset:
    """The bounds of that name; those without a name leave a fifth free."""
    if name is None:
        return DEFAULT
    if name not in PRESETS:
        raise UsageError(
            say("no preset is called {name!r}", name=name),
            why=say("there are {names}", names=listed(PRESETS)),
            fix=(say("name one of them, or none"),),
        )
    return PRESETS[name]


def within(box: Box, bounds: Preset) -> Box:
    """The box with only the share of its free memory that the bounds allow."""
    return replace(
        box,
        pools=tuple(
            replace(pool, free=int(pool.free * bounds.share))
            if pool.name in _SHARED and pool.free is not None
            else pool
            for pool in box.pools
        ),
    )


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


PREFETCHES = (1, 2, 4)
_SLACK = 1.05  # a twentieth of speed is not worth another worker's memory
_WAITING = 4  # workers a core at the most, where they wait more than they compute
_MOST = 64


@dataclass(frozen=True, slots=True)
class Ask:
    """What is wanted."""

    batch_size: int
    effective_batch: int | None = None
    ranks: int = 1
    local_ranks: int | None = None  # on this machine; None: all of them
    step: Step = field(default_factory=Step)
    loader_kind: Literal["torch", "legroom"] = "legroom"
    preset: str | None = None
    process_ram: int = 0  # of a training process that does not run yet

    @property
    def here(self) -> int:
        """Ranks on this machine."""
        return self.local_ranks or self.ranks


@dataclass(frozen=True, slots=True)
class Rung:
    """One setting of the loader."""

    batch: int
    workers: int
    prefetch: int
    pin: bool


@dataclass(frozen=True, slots=True)
class Choice:
    """The rung taken, what it needs, the one that would have been best, and the pace of both."""

    rung: Rung
    plan: Plan
    ideal: Rung
    refused: Plan | None  # the ideal's plan, where it did not fit
    together: int  # samples of one optimizer step on one rank
    cores: float  # for one rank
    bounds: Preset


def choose(measured: Measured, box: Box, ask: Ask) -> Choice:
    """The settings to take."""
    together = per_rank(ask.batch_size, ask.effective_batch, ask.ranks)
    bounds = preset(ask.preset)
    cores = max(1.0, (usable_cores(box) or 1) / ask.here)
    ideal = _ideal(measured, box, ask, cores, bounds)
    refused = None
    for rung in _ladder(ideal, together):
        plan = plan_of(measured, box, ask, rung)
        if plan.verdict != "too-big":
            break
        refused = refused or plan
    return Choice(rung, plan, ideal, refused, together, cores, bounds)


def workload(measured: Measured, ask: Ask, rung: Rung) -> Workload:
    """What training with these settings does, on every rank of this machine."""
    way = measured.transport
    loader = Loader(
        tensors=tuple(-(-size * rung.batch // measured.batch_size) for size in measured.tensors),
        workers=rung.workers,
        prefetch=rung.prefetch,
        batches=_batches(measured, ask, rung.batch),
        again=not preset(ask.preset).persistent,
        pin_memory=rung.pin,
        kind=ask.loader_kind,
        source=measured.source,
    )
    return Workload(
        processes=ask.here,
        loaders=(loader,),
        worker_ram=(way.worker_ram or 0) if way else 0,
        process_ram=ask.process_ram,
        process_ram_source=say("the process that measured"),
    )


def plan_of(measured: Measured, box: Box, ask: Ask, rung: Rung) -> Plan:
    """Whether a rung fits what the preset allows of the box."""
    return fit(need(workload(measured, ask, rung)), within(box, preset(ask.preset)))


def most_workers(measured: Measured, ask: Ask, cores: float, bounds: Preset) -> tuple[int, str]:
    """Workers beyond which none can pay, and which bound that is: a name for the explanation."""
    if measured.unsendable is not None:
        return 0, "unsendable"
    limits = [(_MOST, "most")]
    waiting = measured.wait_seconds > measured.cpu_seconds
    limits.append((round(cores * _WAITING) if waiting else round(cores), "waiting" if waiting else "cores"))
    if measured.iterable:
        limits.append((1, "iterable"))
    if bounds.most_workers is not None:
        limits.append((bounds.most_workers, "preset"))
    batches = _batches(measured, ask, ask.batch_size)
    if batches is not None:
        limits.append((batches, "batches"))
    return min(limits)


def pace(measured: Measured, rung: Rung, cores: float, step: Step) -> float:
    """Seconds from batch to batch on that rung."""
    return batch_seconds(measured, rung.batch, rung.workers, rung.prefetch, cores, step)


def _batches(measured: Measured, ask: Ask, batch: int) -> int | None:
    return None if measured.rows is None else max(1, -(-measured.rows // (batch * ask.ranks)))


def _ideal(measured: Measured, box: Box, ask: Ask, cores: float, bounds: Preset) -> Rung:
    most, _ = most_workers(measured, ask, cores, bounds)
    pin = bool(box.gpus.cards)
    rungs = [Rung(ask.batch_size, 0, 1, pin)]
    rungs += [
        Rung(ask.batch_size, workers, prefetch, pin)
        for workers in range(1, most + 1)
        for prefetch in PREFETCHES
    ]
    times = {rung: pace(measured, rung, cores, ask.step) for rung in rungs}
    enough = min(times.values()) * _SLACK
    fast = [rung for rung in rungs if times[rung] <= enough]
    if _overlaps(measured, ask):
        fast = [rung for rung in fast if rung.workers] or fast
    return min(
        fast,
        key=lambda rung: (need(workload(measured, ask, rung)).ram, rung.workers, rung.prefetch),
    )


def _overlaps(measured: Measured, ask: Ask) -> bool:
    """Whether a worker is worth having though it is no faster: it works while a step of unknown length runs."""
    known = bool(ask.step.seconds)
    return not known and load_seconds(measured, ask.batch_size) > way_seconds(measured, ask.batch_size)


def _ladder(ideal: Rung, together: int) -> Iterator[Rung]:
    """From the ideal down, each rung taking no more from any pool than the one before."""
    rung = ideal
    yield rung
    for prefetch in reversed(PREFETCHES):
        if prefetch < rung.prefetch:
            rung = replace(rung, prefetch=prefetch)
            yield rung
    if rung.pin:
        rung = replace(rung, pin=False)
        yield rung
    for workers in range(ideal.workers - 1, -1, -1):
        rung = replace(rung, workers=workers)
        yield rung
    for batch in smaller_batches(ideal.batch, together):
        yield replace(rung, batch=batch)


_GAIN = 1.05  # a rung must be this much faster than the last good one to be worth its memory
_PATIENCE = 2  # rungs without a gain before the climb ends: one slow run is no plateau


@dataclass(frozen=True, slots=True)
class Climbed:
    """The last good rung, and the line that tells of the climb."""

    rung: Rung
    why: str


def climb(
    measured: Measured, box: Box, ask: Ask, choice: Choice, run: Callable[[Rung], float | str]
) -> Climbed:
    """Raise workers, then prefetch; ``run`` gives samples a second, or in words why it failed."""
    base = replace(choice.rung, workers=0, prefetch=1)
    most, _ = most_workers(measured, ask, choice.cores, choice.bounds)
    up = [replace(base, workers=workers) for workers in range(most + 1)]
    good, told, failed = _raise(measured, box, ask, up, run)
    if good.workers and not failed:
        deeper = [good, *(replace(good, prefetch=prefetch) for prefetch in PREFETCHES[1:])]
        good, more, _ = _raise(measured, box, ask, deeper, run)
        told += more[1:]
    return Climbed(
        good,
        say("workers {workers}: climbed, {told}", workers=good.workers, told=joined(told)),
    )


def _raise(
    measured: Measured, box: Box, ask: Ask, rungs: list[Rung], run: Callable[[Rung], float | str]
) -> tuple[Rung, list[str], bool]:
    good, best, told, without = rungs[0], 0.0, [], 0
    for rung in rungs:
        name = say("{workers} × {prefetch}", workers=rung.workers, prefetch=rung.prefetch)
        plan = plan_of(measured, box, ask, rung)
        if plan.verdict == "too-big" and rung is not rungs[0]:
            told.append(say("{name} would not fit: {problem}", name=name, problem=plan.problems[0].message))
            return good, told, True
        found = run(rung)
        if isinstance(found, str):
            told.append(say("{name} failed: {why}", name=name, why=found))
            return good, told, True
        told.append(say("{name} gave {rate:.0f} samples/s", name=name, rate=found))
        if found > best * _GAIN:
            good, best, without = rung, found, 0
        else:
            without += 1
            if without >= _PATIENCE:
                break
    return good, told, False
