"""DataLoader settings that fit this machine: for `legroom doctor`, and for a measured dataset (`legroom tune`).

For a measured dataset: fast enough, with the least memory, same effective batch size. Presets bound the share of free
memory and the number of workers. `--benchmark` raises them step by step in real runs.

For doctor, without knowing the dataset: the largest batch for a number of workers and prefetch. torch's DataLoader
keeps up to workers × prefetch + 2 batches in /dev/shm, and one more without persistent_workers
(docs/evidence/loader-peak.md). The settings fit either way, and `check` agrees. Each tensor takes whole pages after a
header of 64 bytes; only the file_system strategy has that header, and counting it always costs at most a page.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import log, sqrt

from legroom.advice.fit_on_machine import fit, per_rank, smaller_candidates
from legroom.advice.memory_need import PAGE, TENSOR_HEADER, batches_in_flight, need, semaphores
from legroom.errors import DatasetFailed
from legroom.messages import joined, say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings, LoaderKind, LoaderSettings, SafeSettings
from legroom.records.machine import Machine
from legroom.records.workload import Measured, Plan, PlannedLoader, Workload
from legroom.system.argument_checks import check_choice
from legroom.units import format_size

_SHARED = ("shm", "ram", "pinned")  # shared with other processes


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds for a choice."""

    name: str
    share: float  # of the free memory of each pool
    most_workers: int | None = None  # None: as many as make it faster
    persistent: bool = True


# A fifth stays free for kept batches and other processes.
DEFAULT = Preset("none", 0.8)
PRESETS = {
    # Starts and stops quickly beside an editor and a browser.
    "development": Preset("development", 0.25, most_workers=1, persistent=False),
    # A long run has peaks that a short measurement does not show.
    "production": Preset("production", 0.6),
    # The scheduler's limit applies to this job alone.
    "cluster": Preset("cluster", 0.9),
}


def preset(name: str | None) -> Preset:
    """The preset of that name; without a name, the default."""
    if name is None:
        return DEFAULT
    check_choice("preset", name, PRESETS)
    return PRESETS[name]


def within(machine: Machine, bounds: Preset) -> Machine:
    """The machine with only the share of its free memory that the preset allows."""
    return machine.with_free({
        pool.name: int(pool.free * bounds.share)
        for pool in machine.pools if pool.name in _SHARED and pool.free is not None
    })  # fmt: skip


@dataclass(frozen=True, slots=True)
class Step:
    """One training step on one batch; 0 seconds: unknown, and the DataLoader should be as fast as possible."""

    seconds: float = 0.0
    cpu_seconds: float = 0.0  # of it, on the host's cores


def load_seconds(measured: Measured, batch: int) -> float:
    """Seconds to assemble one batch in the training process."""
    return batch * measured.sample_seconds + _collate(measured, batch)


def batch_seconds(measured: Measured, batch: int, workers: int, prefetch: int, cores: float, step: Step) -> float:
    """Seconds from one batch to the next."""
    if workers == 0:
        return load_seconds(measured, batch) + step.seconds
    sending, receiving, idle = _way(measured, batch)
    work = batch * measured.worker_seconds + _collate(measured, batch) + sending
    # With prefetch 1 a worker is idle until the next batch is requested.
    cycle = work * (1 + _uneven(measured, batch, workers) / prefetch) + (idle if prefetch == 1 else 0.0)
    computing = batch * measured.cpu_seconds + _collate(measured, batch) + sending + receiving + step.cpu_seconds
    return max(cycle / workers, computing / cores, receiving + step.seconds, _seen(measured, batch, workers))


def _collate(measured: Measured, batch: int) -> float:
    return measured.collate_seconds * batch / measured.batch_size


def _way(measured: Measured, batch: int) -> tuple[float, float, float]:
    """Seconds for sending, receiving and idling. If it was not measured, one more copy each is assumed."""
    share = batch / measured.batch_size
    if measured.transport is None:
        return _collate(measured, batch), _collate(measured, batch), 0.0
    way = measured.transport
    # The fixed cost of a message does not shrink with the batch: counted in full, which is conservative.
    return way.worker_seconds * share, way.parent_seconds, way.latency_seconds


def _seen(measured: Measured, batch: int, workers: int) -> float:
    """Time per batch of two real workers with free samples; more workers can at best divide it."""
    if measured.transport is None:
        return 0.0
    return measured.transport.two_seconds * batch / measured.batch_size * min(1.0, 2 / workers)


def _uneven(measured: Measured, batch: int, workers: int) -> float:
    """How late the slowest worker's batch is, as a share: batches arrive in order, so all wait for it."""
    if workers < 2:
        return 0.0
    return measured.spread / sqrt(batch) * sqrt(2 * log(workers))


PREFETCHES = (1, 2, 4)
SLACK = 1.05  # 5 % of speed is not worth another worker's memory
_WAITING = 4  # most workers per core if they wait more than they compute
_MOST = 64


@dataclass(frozen=True, slots=True)
class TuneRequest(LoaderSettings):
    """What ``legroom.tune`` is asked for."""

    batch_size: int
    ranks: int = 1
    loader_kind: LoaderKind = "legroom"
    effective_batch: int | None = None  # samples per optimizer step over all ranks; None: one batch per rank
    local_ranks: int | None = None  # on this machine; None: all of them
    step: Step = field(default_factory=Step)
    preset: str | None = None
    process_ram: int = 0  # of a training process that does not run yet
    larger_than_dataset: int | None = None  # the batch size that was asked for, where the dataset has fewer samples

    @property
    def here(self) -> int:
        """Ranks on this machine."""
        return self.local_ranks or self.ranks


@dataclass(frozen=True, slots=True)
class TuneCase:
    """A measured dataset, the machine, and what is asked for."""

    measured: Measured
    machine: Machine
    request: TuneRequest

    @property
    def together(self) -> int:
        """Samples of one optimizer step on one rank."""
        return per_rank(self.request.batch_size, self.request.effective_batch, self.request.ranks)

    @property
    def cores(self) -> float:
        """For one rank."""
        return max(1.0, (usable_cores(self.machine) or 1) / self.request.here)

    @property
    def bounds(self) -> Preset:
        """What the preset allows."""
        return preset(self.request.preset)


@dataclass(frozen=True, slots=True)
class TunedChoice(TuneCase):
    """The chosen settings and their need, and the ideal settings if memory were not limited."""

    settings: CompleteLoaderSettings
    plan: Plan
    ideal: CompleteLoaderSettings
    refused: Plan | None  # the plan of the ideal settings, if they did not fit


def within_dataset(request: TuneRequest, measured: Measured) -> TuneRequest:
    """The request, with batches of at most the samples of a rank; an effective batch that is asked for is kept."""
    most = request.batch_size if measured.rows is None else max(1, measured.rows // request.ranks)
    if request.effective_batch is not None or request.batch_size <= most:
        return request
    return replace(request, batch_size=most, larger_than_dataset=request.batch_size)


def choose(measured: Measured, machine: Machine, request: TuneRequest) -> TunedChoice:
    """The settings to take."""
    case = TuneCase(measured, machine, request)
    together = case.together  # refuses an effective batch that cannot be kept
    ideal = _ideal(case)
    refused = None
    for candidate in smaller_candidates(ideal, together, PREFETCHES):
        plan = plan_of(case, candidate)
        if plan.verdict != "too-big":
            break
        refused = refused or plan
    return TunedChoice(measured, machine, request, candidate, plan, ideal, refused)


def workload(case: TuneCase, candidate: CompleteLoaderSettings) -> Workload:
    """The workload with these settings, on all ranks of this machine."""
    measured, request = case.measured, case.request
    way = measured.transport
    loader = PlannedLoader(
        tensors=tuple(-(-size * candidate.batch_size // measured.batch_size) for size in measured.tensors),
        batch_size=candidate.batch_size,
        num_workers=candidate.num_workers,
        prefetch_factor=candidate.prefetch_factor,
        batches=_batches(case, candidate.batch_size),
        persistent_workers=candidate.persistent_workers,
        pin_memory=candidate.pin_memory,
        loader_kind=request.loader_kind,
        source=measured.source,
    )
    return Workload(
        processes=request.here,
        loaders=(loader,),
        worker_ram=(way.worker_ram or 0) if way else 0,
        process_ram=request.process_ram,
        process_ram_source=say("measured in the measuring process"),
    )


def plan_of(case: TuneCase, candidate: CompleteLoaderSettings) -> Plan:
    """Whether these settings fit into the memory that the preset allows."""
    return fit(need(workload(case, candidate)), within(case.machine, case.bounds))


def most_workers(case: TuneCase) -> tuple[int, str]:
    """The most workers worth trying, and the name of the limit for the explanation."""
    measured, cores = case.measured, case.cores
    if measured.unsendable is not None:
        return 0, "unsendable"
    limits = [(_MOST, "most")]
    waiting = measured.wait_seconds > measured.cpu_seconds
    limits.append((round(cores * _WAITING) if waiting else round(cores), "waiting" if waiting else "cores"))
    if measured.iterable:
        limits.append((1, "iterable"))
    if case.bounds.most_workers is not None:
        limits.append((case.bounds.most_workers, "preset"))
    batches = _batches(case, case.request.batch_size)
    if batches is not None:
        limits.append((batches, "batches"))
    return min(limits)


def pace(case: TuneCase, candidate: CompleteLoaderSettings) -> float:
    """Seconds between batches with these settings."""
    return batch_seconds(
        case.measured, candidate.batch_size, candidate.num_workers, candidate.prefetch_factor, case.cores,
        case.request.step,
    )  # fmt: skip


def _batches(case: TuneCase, batch: int) -> int | None:
    rows = case.measured.rows
    return None if rows is None else max(1, -(-rows // (batch * case.request.ranks)))


def _ideal(case: TuneCase) -> CompleteLoaderSettings:
    most, _ = most_workers(case)
    one = CompleteLoaderSettings(
        batch_size=case.request.batch_size,
        ranks=case.request.ranks,
        prefetch_factor=1,
        persistent_workers=case.bounds.persistent,
        pin_memory=bool(case.machine.gpus.cards),
        loader_kind=case.request.loader_kind,
    )
    candidates = [one]
    candidates += [
        replace(one, num_workers=workers, prefetch_factor=prefetch)
        for workers in range(1, most + 1)
        for prefetch in PREFETCHES
    ]
    times = {candidate: pace(case, candidate) for candidate in candidates}
    enough = min(times.values()) * SLACK
    fast = [candidate for candidate in candidates if times[candidate] <= enough]
    if _overlaps(case):
        fast = [candidate for candidate in fast if candidate.num_workers] or fast
    return min(
        fast,
        key=lambda candidate: (need(workload(case, candidate)).ram, candidate.num_workers, candidate.prefetch_factor),
    )


def _overlaps(case: TuneCase) -> bool:
    """Whether a worker is worth it although it is not faster: it works during the training step."""
    known, batch = bool(case.request.step.seconds), case.request.batch_size
    return not known and load_seconds(case.measured, batch) > sum(_way(case.measured, batch))


_GAIN = 1.05  # settings must be this much faster than the last good ones to be worth their memory
_PATIENCE = 2  # runs without a gain before it stops: one slow run is not a plateau


@dataclass(frozen=True, slots=True)
class Climbed:
    """The last good settings, and the explanation of the measured steps."""

    settings: CompleteLoaderSettings
    why: str


def climb(choice: TunedChoice, run: Callable[[CompleteLoaderSettings], float | str]) -> Climbed:
    """Raise workers, then prefetch; ``run`` returns samples per second, or the reason of its failure.

    DatasetFailed where not even the first run, without workers, works: no settings are known to.
    """
    base = replace(choice.settings, num_workers=0, prefetch_factor=1)
    most, _ = most_workers(choice)
    up = [replace(base, num_workers=workers) for workers in range(most + 1)]
    good, told, failed = _raise(choice, up, run)
    if good.num_workers and not failed:
        deeper = [good, *(replace(good, prefetch_factor=prefetch) for prefetch in PREFETCHES[1:])]
        good, more, _ = _raise(choice, deeper, run)
        told += more[1:]
    return Climbed(
        good, say("workers {workers}: measured step by step, {told}", workers=good.num_workers, told=joined(told))
    )


def _raise(
    case: TuneCase, candidates: list[CompleteLoaderSettings], run: Callable[[CompleteLoaderSettings], float | str]
) -> tuple[CompleteLoaderSettings, list[str], bool]:
    good, best, told, without = candidates[0], 0.0, [], 0
    for candidate in candidates:
        name = f"{candidate.num_workers} × {candidate.prefetch_factor}"
        plan = plan_of(case, candidate)
        if plan.verdict == "too-big" and candidate is not candidates[0]:
            told.append(say("{name} does not fit: {problem}", name=name, problem=plan.problems[0].message))
            return good, told, True
        found = run(candidate)
        if isinstance(found, str) and not candidate.num_workers:
            raise DatasetFailed(
                say("the DataLoader failed without workers, so no more were tried"),
                why=found,
                fix=(say("first make one epoch of this DataLoader work by itself"),),
            )
        if isinstance(found, str):
            told.append(say("{name} failed: {why}", name=name, why=found))
            return good, told, True
        told.append(say("{name}: {rate:.0f} samples/s", name=name, rate=found))
        if found > best * _GAIN:
            good, best, without = candidate, found, 0
        else:
            without += 1
            if without >= _PATIENCE:
                break
    return good, told, False


_HEADROOM = 0.8  # the rest is for other processes and kept batches
_CHOICES = ((4, 2), (2, 2), (1, 1))
_PIN_ROOM = 0.1  # pinned memory cannot be reclaimed: do not pin if less than this share of RAM is free


def largest_batch(room: int, workers: int, prefetch: int, *, making: int = 0) -> int:
    """The largest single-tensor batch for which all in flight, and ``making`` being assembled, fit into ``room``."""
    left = int(room * _HEADROOM) - semaphores(workers) * PAGE
    pages = left // (batches_in_flight(workers, prefetch, again=True) + making) // PAGE
    # Printing three digits may round up, and one byte more would be another page per batch: subtract that.
    return max(0, pages * PAGE - TENSOR_HEADER - pages * PAGE // 128)


def safe_settings(machine: Machine) -> tuple[SafeSettings, ...]:
    """Settings that fit now, most workers first; the last, without workers, needs no /dev/shm."""
    cores = usable_cores(machine)
    pin, pin_why = _pinning(machine)
    rows = []
    for workers, prefetch in _CHOICES:
        if cores is not None and workers > max(1, cores):
            continue
        largest, bound_by, why = _bound(machine, workers, prefetch)
        if largest == 0:
            continue
        rows.append(
            SafeSettings(
                num_workers=workers,
                prefetch_factor=prefetch,
                pin_memory=pin,
                persistent_workers=True,
                max_batch_bytes=largest,
                known=largest is not None,
                bound_by=bound_by,
                why=why,
                pin_why=pin_why,
            )
        )
    why = say("without workers no shared memory is used")
    return (*rows, SafeSettings(pin_memory=pin, why=why, pin_why=pin_why))


def usable_cores(machine: Machine) -> int | None:
    """Whole cores this process may use: its affinity, or its CPU quota if lower."""
    cores = machine.cpu.affinity
    if machine.cpu.quota is not None:
        quota = max(1, int(machine.cpu.quota))
        cores = quota if cores is None else min(cores, quota)
    return cores


def _bound(machine: Machine, workers: int, prefetch: int) -> tuple[int | None, str, str]:
    """The largest batch, the pool that limits it (/dev/shm, or RAM if lower), and why.

    RAM also backs /dev/shm, and each worker has the batch that it is assembling.
    """
    shm, ram = machine.pool("shm"), machine.pool("ram")
    if shm is None or shm.free is None:
        return None, "shm", say("free space in /dev/shm is unknown")
    flights = batches_in_flight(workers, prefetch, again=True)
    largest = largest_batch(shm.free, workers, prefetch)
    if ram is not None and ram.free is not None:
        by_ram = largest_batch(ram.free, workers, prefetch, making=workers)
        if by_ram < largest:
            why = say(
                "80% of {room} free RAM, divided by {count} batches in flight and {workers} being "
                "assembled",
                room=format_size(ram.free), count=flights, workers=workers,
            )  # fmt: skip
            return by_ram, "ram", why
    why = say(
        "80% of {room} free in {pool}, divided by {count} batches in flight",
        room=format_size(shm.free), pool="shm", count=flights,
    )  # fmt: skip
    return largest, "shm", why


def _pinning(machine: Machine) -> tuple[bool, str]:
    if not machine.gpus.cards:
        return False, say("pin_memory off: no GPU found")
    ram = machine.pool("ram")
    if ram is None or ram.free is None or ram.size is None:
        return False, say("pin_memory off: free RAM is unknown")
    if ram.free < _PIN_ROOM * ram.size:
        return False, say(
            "pin_memory off: it uses host RAM, of which {free} of {size} is free",
            free=format_size(ram.free), size=format_size(ram.size),
        )  # fmt: skip
    return True, say("pin_memory on: uses host RAM, not /dev/shm")
