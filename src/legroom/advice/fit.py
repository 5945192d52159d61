"""Whether a need fits a machine, which pool runs out first, and the largest settings that fit.

The effective batch size (batch × accumulation × ranks) never changes silently. Sizes for /dev/shm follow from the need
and what caps them.
"""

from __future__ import annotations

from dataclasses import replace

from legroom.advice import remedies
from legroom.advice.memory_need import need
from legroom.advice.plan_inputs import Batch, Demand, workload_of
from legroom.advice.safe_settings import PAGE
from legroom.errors import UsageError
from legroom.records import Box, Fit, Job, Need, Plan, Pool, Problem, Settings, ShmSizes
from legroom.system.argument_checks import check_integer
from legroom.units import format_size
from legroom.words import say


def per_rank(batch: int, effective: int | None, ranks: int) -> int:
    """Samples of one optimizer step on one rank; without an effective batch asked for, one batch."""
    batch = check_integer("batch_size", batch, 1)
    ranks = check_integer("ranks", ranks, 1)
    if effective is None:
        return batch
    effective = check_integer("effective_batch", effective, 1)
    step = batch * ranks
    if effective % step:
        below = effective // step * step
        near = say("{below} or {above}", below=below, above=below + step) if below else str(step)
        raise UsageError(
            say("an effective batch of {effective} cannot be kept", effective=effective),
            why=say("batch {batch} × {ranks} ranks = {step} samples at a time, and {effective} is no multiple of it",
                    batch=batch, ranks=ranks, step=step, effective=effective),
            fix=(
                say("the nearest that can be: {near}", near=near),
                say("or a batch of {sizes}", sizes=_batches(batch, effective, ranks)),
            ),
        )  # fmt: skip
    return effective // ranks


def smaller_batches(batch: int, together: int) -> list[int]:
    """Batches below ``batch`` that still divide ``together``, the largest first."""
    return [size for size in range(batch - 1, 0, -1) if together % size == 0]


def _batches(batch: int, effective: int, ranks: int) -> str:
    if effective % ranks:
        return say("any size, once the ranks divide it")
    whole = effective // ranks
    below = next((size for size in range(min(batch, whole), 0, -1) if whole % size == 0), 1)
    above = next((size for size in range(batch, whole + 1) if whole % size == 0), None)
    return str(below) if above is None else say("{below} or {above}", below=below, above=above)


FLOOR = 512 << 20  # no recommendation below it: a power of two costs nothing until it is used


def power_of_two(amount: int) -> int:
    """The next power of two at or above it; at least one page."""
    return max(PAGE, 1 << max(0, amount - 1).bit_length())


def advise(need: int, *, memory: int | None = None, processes: int = 0, bound: str = "") -> ShmSizes:
    """The three sizes for a need; ``memory`` is the limit behind it, ``processes`` what they take besides.

    ``bound`` names the limit in words. Nothing is capped where the limit is unknown.
    """
    minimum = power_of_two(need)
    recommended = max(FLOOR, power_of_two(2 * need))
    sizes = ShmSizes(minimum, recommended, 2 * recommended)
    if memory is None:
        return sizes
    room = max(0, memory - processes) // PAGE * PAGE
    if sizes.conservative <= room:
        return sizes
    why = say(
        "{bound} {memory} less {processes} for the processes" if processes else "{bound} {memory}",
        bound=bound or say("the memory limit of"), memory=format_size(memory), processes=format_size(processes),
    )  # fmt: skip
    return ShmSizes(min(minimum, room), min(recommended, room), min(sizes.conservative, room), why)


def relieve(box: Box, pool: str, amount: int) -> tuple[str, ...]:
    """How to get room for ``amount`` in that pool, here."""
    ram, total = box.pool("ram"), box.memory.total
    size = ram.size if ram else None
    if pool == "shm":
        wanted = amount + (box.shm.used or 0)
        advised = advise(wanted, memory=size).recommended
        if advised < wanted:  # more than there is memory behind it
            return (*remedies.use_less_shm(), remedies.check_room("/dev/shm"))
        return remedies.enlarge_shm(box.place, advised)
    if pool == "ram":
        bounded = size is not None and (total is None or size < total)
        return remedies.raise_ram_limit(box.place, size if bounded else None, total)
    if pool == "fds":
        return remedies.raise_nofile(box.place, box.limits.nofile_soft or 0, box.limits.nofile_hard)
    if pool == "disk":
        return remedies.free_disk(next((disk.path for disk in box.disks if disk.role == "store"), "."))
    return remedies.unpin() if pool == "pinned" else remedies.use_less_gpu(box.place)


_COUNTED = ("shm", "ram", "fds", "disk")


def fit(need: Need, box: Box) -> Plan:
    """The verdict, the worst pool first."""
    asked = {name: getattr(need, name) for name in _COUNTED}
    problems: list[Problem] = []
    unknown: dict[str, str] = {}
    for name, amount in asked.items():
        _judge(box, name, amount, _room(box, name), problems, unknown)
    if need.gpu:
        for pool in _cards(box):
            _judge(box, pool.name, need.gpu, pool.free, problems, unknown)
        if not _cards(box):
            unknown["gpu"] = box.gpus.reason or say("no card could be read")
    problems.sort(key=lambda problem: -(problem.need / max(1, problem.free)))
    verdict: Fit = "too-big" if problems else "unknown" if unknown else "fits"
    fix = problems[0].fix if problems else ()
    return Plan(need=need, verdict=verdict, problems=tuple(problems), unknown=unknown, fix=fix)


def _judge(
    box: Box, name: str, amount: int, room: int | None, problems: list[Problem], unknown: dict[str, str]
) -> None:
    if not amount:
        return
    pool = box.pool(name)
    if room is None:
        unknown[name] = (pool.reason or pool.source) if pool else say("this machine has no such pool")
    elif amount > room:
        problems.append(Problem(name, amount, room, _message(name, amount, room), relieve(box, name, amount)))


def _room(box: Box, name: str) -> int | None:
    """What may still be taken; descriptors are each process's own, so there the whole limit."""
    pool = box.pool(name)
    if pool is None:
        return None
    return pool.size if name == "fds" and pool.free is None else pool.free


def _cards(box: Box) -> list[Pool]:
    return [pool for pool in box.pools if pool.name.startswith("gpu")]


def _message(name: str, amount: int, room: int) -> str:
    if name == "fds":
        return say("{amount} descriptors needed, {room} allowed", amount=amount, room=room)
    return say(
        "{name}: {amount} needed, {room} free, {missing} too little",
        name=name, amount=format_size(amount), room=format_size(room), missing=format_size(amount - room),
    )  # fmt: skip


_MOST = 1 << 20  # samples: above it no batch size is looked for


def fits(demand: Demand, batch: Batch, box: Box) -> bool:
    """Whether nothing that is known speaks against it."""
    return judged(demand, batch, box).verdict != "too-big"


def judged(demand: Demand, batch: Batch, box: Box) -> Plan:
    """The verdict; on our loader with fewer batches on their way, where all that it would like do not fit."""
    verdict = fit(need(workload_of(demand, batch, demand.ranks, demand.ranks)), box)
    if verdict.verdict != "too-big" or demand.kind != "legroom" or demand.squeezed:
        return verdict
    least = judged(replace(demand, squeezed=True), batch, box)
    if least.verdict == "too-big":
        return least
    note = say(
        "at full speed it would take {full} of RAM; it makes do with {less}, and is slower",
        full=format_size(verdict.need.ram), less=format_size(least.need.ram),
    )  # fmt: skip
    return replace(least, notes=(*least.notes, note))


def largest_settings(
    demand: Demand, batch: Batch, box: Box, *, fitting: bool | None = None
) -> Settings | None:
    """What was asked for where it fits, else the nearest that does; None where no setting helps.

    ``fitting``: whether what was asked for fits, where a trial run has told.
    """
    if fitting:
        return _settings(demand, demand, batch.samples, 1)
    for workers, prefetch in _down(demand)[0 if fitting is None else 1 :]:
        lower = _with(demand, workers, prefetch)
        if fits(lower, batch, box):
            return _settings(demand, lower, batch.samples, 1)
    alone = _with(demand, 0, 1)
    for samples in _divisors(batch.samples):
        if fits(alone, batch.of(samples), box):
            return _settings(demand, alone, samples, batch.samples // samples)
    return None


def largest_batch(demand: Demand, batch: Batch, box: Box) -> int | None:
    """The most samples of a batch at these workers and prefetch; None: nothing bounds it, 0: none fits."""
    if fits(demand, batch.of(_MOST), box):
        return None
    low, high = 0, _MOST  # low fits, or is no batch at all; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        if fits(demand, batch.of(middle), box):
            low = middle
        else:
            high = middle
    return low


def _down(demand: Demand) -> list[tuple[int, int]]:
    steps = [(w, p) for w in range(demand.workers, 0, -1) for p in range(demand.prefetch, 0, -1)]
    return [*steps, (0, demand.prefetch)]


def _with(demand: Demand, workers: int, prefetch: int) -> Demand:
    val = demand.val_workers
    return replace(
        demand, workers=workers, prefetch=prefetch, val_workers=None if val is None else min(val, workers)
    )


def _divisors(samples: int) -> list[int]:
    """Smaller batches that accumulate to the same number of samples, largest first."""
    return [part for part in range(samples // 2, 0, -1) if samples % part == 0]


def _settings(asked: Demand, chosen: Demand, samples: int, accumulation: int) -> Settings:
    why = {}
    if chosen.prefetch != asked.prefetch and chosen.workers:
        why["prefetch_factor"] = say(
            "prefetch {new} instead of {old}: fewer batches in flight",
            new=chosen.prefetch,
            old=asked.prefetch,
        )
    if chosen.workers != asked.workers:
        why["num_workers"] = say(
            "{new} workers instead of {old}: each holds its own batches",
            new=chosen.workers,
            old=asked.workers,
        )
    if accumulation > 1:
        why["batch_size"] = say(
            "batch {new} × accumulation {times} instead of {old}: the same effective batch",
            new=samples, times=accumulation, old=samples * accumulation,
        )  # fmt: skip
    return Settings(
        batch_size=samples,
        accumulation=accumulation,
        ranks=chosen.ranks,
        num_workers=chosen.workers,
        prefetch_factor=chosen.prefetch if chosen.workers else None,
        persistent_workers=chosen.workers > 0,
        pin_memory=chosen.pin_memory,
        loader_kind=chosen.kind,
        why=why,
    )


_SHARED = ("shm", "ram")


def bind(box: Box, job: Job) -> Job:
    """The job with its share of each card, and the pool named that it will run out of first."""
    job = replace(job, held={**job.held, **_on_cards(box, job)})
    shares: list[tuple[float, str, str]] = []
    for pool in box.pools:
        ours = pool.name in _SHARED or (pool.name.startswith("gpu") and pool.name in job.held)
        if ours and pool.size and pool.free is not None:
            text = say("{free} of {size} left", free=format_size(pool.free), size=format_size(pool.size))
            shares.append((1 - pool.free / pool.size, pool.name, text))
    for process in job.processes:
        if process.fds is not None and process.fd_limit:
            text = say(
                "pid {pid} holds {fds} of {limit} descriptors",
                pid=process.pid, fds=process.fds, limit=process.fd_limit,
            )  # fmt: skip
            shares.append((process.fds / process.fd_limit, "fds", text))
    if not shares:
        return replace(job, binds=None, binds_why=say("no pool it uses has a known size"))
    share, name, text = max(shares)
    why = say("{name} is {share:.0%} used, {text}", name=name, share=share, text=text)
    return replace(job, binds=name, binds_why=why)


def _on_cards(box: Box, job: Job) -> dict[str, int | None]:
    """What the job's processes hold of each card they are on; None where the driver does not tell."""
    pids = {process.pid for process in job.processes}
    held: dict[str, int | None] = {}
    for card in box.gpus.cards:
        ours = [process.used for process in card.processes or () if process.pid in pids]
        if ours:
            held[f"gpu{card.index}"] = None if None in ours else sum(used or 0 for used in ours)
    return held
