"""Whether a need fits a machine, which pool runs out first, what is given up until settings fit, and how many jobs fit.

The effective batch size (batch × accumulation × ranks) never changes silently. Sizes for /dev/shm follow from the need
and the RAM limit. A plan scales one job to GPUs × jobs, adds what other processes use, and caps sizes by RAM: three
sizes for /dev/shm, a table, and how many jobs fit now.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import replace

from legroom.advice import fix_commands
from legroom.advice.fix_commands import SHM_SHARE, enlarge_shm
from legroom.advice.job_settings_to_workload import Batch, Demand, workload_of
from legroom.advice.memory_need import PAGE, free_amount, need
from legroom.errors import UsageError
from legroom.messages import RANKS, SAMPLES, WORKERS, counted, phrase, say
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.machine import Machine, Pool
from legroom.records.settings_and_overrides import Settings
from legroom.records.workload import Fit, Job, Need, Plan, PlanRow, Problem, ShmSizes, Workload
from legroom.system.argument_checks import check_integer
from legroom.units import format_size


def per_rank(batch: int, effective: int | None, ranks: int) -> int:
    """Samples per optimizer step on one rank; without a requested effective batch, one batch."""
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
            why=say("batch {batch} × {ranks} = {samples}; {effective} is not a multiple of that",
                    batch=batch, ranks=counted(ranks, *RANKS),
                    samples=counted(step, *SAMPLES), effective=effective),
            fix=(
                say("use an effective batch of {near}", near=near),
                *(
                    []
                    if effective % ranks
                    else [say("or a batch size of {sizes}", sizes=_batches(batch, effective // ranks))]
                ),
            ),
        )  # fmt: skip
    return effective // ranks


def smaller_batches(batch: int, together: int) -> list[int]:
    """Batch sizes below ``batch`` that divide ``together``, largest first."""
    return [size for size in range(batch - 1, 0, -1) if together % size == 0]


def smaller_candidates(
    ideal: CompleteLoaderSettings, together: int, prefetches: Sequence[int]
) -> Iterator[CompleteLoaderSettings]:
    """From the ideal settings down: prefetch, pinned memory, workers and then the batch size are given up.

    Each needs no more of any pool than the one before.
    """
    candidate = ideal
    yield candidate
    for prefetch in reversed(prefetches):
        if prefetch < candidate.prefetch_factor:
            candidate = replace(candidate, prefetch_factor=prefetch)
            yield candidate
    if candidate.pin_memory:
        candidate = replace(candidate, pin_memory=False)
        yield candidate
    for workers in range(ideal.num_workers - 1, -1, -1):
        candidate = replace(candidate, num_workers=workers)
        yield candidate
    for batch in smaller_batches(ideal.batch_size, together):
        yield replace(candidate, batch_size=batch)


def _batches(batch: int, whole: int) -> str:
    """The sizes nearest to ``batch`` that divide the samples of a rank."""
    below = next((size for size in range(min(batch, whole), 0, -1) if whole % size == 0), 1)
    above = next((size for size in range(batch, whole + 1) if whole % size == 0), None)
    return str(below) if above is None else say("{below} or {above}", below=below, above=above)


FLOOR = 512 << 20  # no recommendation below it: a power of two costs nothing until it is used


def power_of_two(amount: int) -> int:
    """The next power of two at or above it; at least one page."""
    return max(PAGE, 1 << max(0, amount - 1).bit_length())


def advise(need: int, *, memory: int | None = None, processes: int = 0, bound: str = "") -> ShmSizes:
    """Three sizes for a need; ``memory`` is the RAM limit, ``processes`` the RAM used besides /dev/shm.

    ``bound`` names the limit in the explanation. Without a known limit nothing is capped.
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
        bound=bound, memory=format_size(memory), processes=format_size(processes),
    )  # fmt: skip
    return ShmSizes(min(minimum, room), min(recommended, room), min(sizes.conservative, room), why)


def relieve(machine: Machine, pool: str, amount: int) -> tuple[str, ...]:
    """The fix that makes ``amount`` fit into that pool here."""
    if pool == "shm":
        wanted, ram = amount + (machine.shm.used or 0), machine.pool("ram")
        advised = advise(wanted, memory=ram.size if ram else None).recommended
        if advised < wanted:  # more than the RAM that backs it
            return (*fix_commands.use_less_shm(), fix_commands.check_room("/dev/shm"))
        return fix_commands.enlarge_shm(machine.runtime, advised)
    if pool == "ram":
        return fix_commands.raise_ram_limit(machine.runtime, machine.ram_limit, machine.memory.total)
    if pool == "fds":
        return fix_commands.raise_nofile(machine.runtime, machine.limits.nofile_soft or 0, machine.limits.nofile_hard)
    if pool == "disk":
        return fix_commands.free_disk(next((disk.path for disk in machine.disks if disk.role == "store"), "."))
    return fix_commands.use_less_gpu(machine.runtime)


_COUNTED = ("shm", "ram", "fds", "disk")


def fit(need: Need, machine: Machine) -> Plan:
    """The verdict, with the worst pool first."""
    asked = {name: getattr(need, name) for name in _COUNTED}
    problems: list[Problem] = []
    unknown: dict[str, str] = {}
    for name, amount in asked.items():
        at_least = name in need.at_least
        _judge(machine, name, amount, free_amount(machine, name), problems, unknown, at_least=at_least)
    if need.gpu:
        for pool in _cards(machine):
            _judge(machine, pool.name, need.gpu, pool.free, problems, unknown)
        if not _cards(machine):
            unknown["gpu"] = machine.gpus.reason or say("no GPU could be read")
    problems.sort(key=lambda problem: -(problem.need / max(1, problem.free)))
    verdict: Fit = "too-big" if problems else "unknown" if unknown else "fits"
    # A larger /dev/shm does not help alone where the RAM that backs it is short too.
    fix = tuple(dict.fromkeys(step for problem in problems for step in problem.fix))
    return Plan(need=need, verdict=verdict, problems=tuple(problems), unknown=unknown, fix=fix)


def _judge(
    machine: Machine,
    name: str,
    amount: int,
    room: int | None,
    problems: list[Problem],
    unknown: dict[str, str],
    *,
    at_least: bool = False,
) -> None:
    if not amount:
        return
    pool = machine.pool(name)
    if room is None:
        unknown[name] = (pool.reason or pool.source) if pool else say("not present on this machine")
    elif amount > room:
        message = _message(name, amount, room, at_least=at_least)
        problems.append(Problem(name, amount, room, message, relieve(machine, name, amount)))


def _cards(machine: Machine) -> list[Pool]:
    return [pool for pool in machine.pools if pool.name.startswith("gpu")]


def _message(name: str, amount: int, room: int, *, at_least: bool) -> str:
    if name == "fds":
        return say(
            "at least {amount} file descriptors needed, the limit is {room}"
            if at_least
            else "{amount} file descriptors needed, the limit is {room}",
            amount=amount, room=room,
        )  # fmt: skip
    return say(
        "{name}: at least {amount} needed, {room} free, {missing} short"
        if at_least
        else "{name}: {amount} needed, {room} free, {missing} short",
        name=name, amount=format_size(amount), room=format_size(room), missing=format_size(amount - room),
    )  # fmt: skip


_MOST = 1 << 20  # samples: no larger batch size is tried


def fits(demand: Demand, batch: Batch, machine: Machine) -> bool:
    """Whether it fits or is unknown."""
    return judged(demand, batch, machine).verdict != "too-big"


def judged(demand: Demand, batch: Batch, machine: Machine) -> Plan:
    """The verdict; for legroom.DataLoader with fewer batches in flight if its preferred number does not fit."""
    verdict = fit(need(workload_of(demand, batch, demand.ranks, demand.ranks)), machine)
    if verdict.verdict != "too-big" or demand.loader_kind != "legroom" or demand.squeezed:
        return verdict
    least = judged(replace(demand, squeezed=True), batch, machine)
    if least.verdict == "too-big":
        return least
    note = say(
        "full speed needs {full} of RAM; with {less} it runs slower",
        full=format_size(verdict.need.ram), less=format_size(least.need.ram),
    )  # fmt: skip
    return replace(least, notes=(*least.notes, note))


def largest_settings(demand: Demand, batch: Batch, machine: Machine, *, fitting: bool | None = None) -> Settings | None:
    """The requested settings if they fit, else the closest that do; None if none fit.

    ``fitting``: whether the requested settings fit, if a trial run has shown it.
    """
    if fitting:
        return _settings(demand, demand, batch.samples, 1)
    for workers, prefetch in _down(demand)[0 if fitting is None else 1 :]:
        lower = _with(demand, workers, prefetch)
        if fits(lower, batch, machine):
            return _settings(demand, lower, batch.samples, 1)
    alone = _with(demand, 0, 1)
    for samples in smaller_batches(batch.samples, batch.samples):
        if fits(alone, batch.of(samples), machine):
            return _settings(demand, alone, samples, batch.samples // samples)
    return None


def largest_batch(demand: Demand, batch: Batch, machine: Machine, *, fitting: bool | None = None) -> int | None:
    """The largest batch size with these workers and prefetch; None: no limit, 0: none fits.

    ``fitting``: whether this batch fits, if that has been judged. The answer never contradicts it: the prediction for
    another size can differ from what a trial run measured, and a larger batch of a short dataset can need less.
    """
    most = _MOST if batch.rows is None else min(_MOST, batch.rows)  # no batch has more samples than the dataset
    if fitting is None:
        fitting = fits(demand, batch, machine)
    low, high = (batch.samples, most) if fitting else (0, batch.samples)
    # The whole dataset as one batch can need less than a little less, of which two batches are ready at once.
    if fitting and (low >= high or all(fits(demand, batch.of(size), machine) for size in (high, high - 1))):
        return None
    # low fits or is 0; high does not fit
    return low + bisect_left(range(low + 1, high), True, key=lambda size: not fits(demand, batch.of(size), machine))


def _down(demand: Demand) -> list[tuple[int, int]]:
    steps = [(w, p) for w in range(demand.num_workers, 0, -1) for p in range(demand.prefetch_factor, 0, -1)]
    return [*steps, (0, demand.prefetch_factor)]


def _with(demand: Demand, workers: int, prefetch: int) -> Demand:
    val = demand.val_workers
    return replace(
        demand, num_workers=workers, prefetch_factor=prefetch, val_workers=None if val is None else min(val, workers)
    )


def _settings(asked: Demand, chosen: Demand, samples: int, accumulation: int) -> Settings:
    why = {}
    if chosen.prefetch_factor != asked.prefetch_factor and chosen.num_workers:
        why["prefetch_factor"] = say(
            "prefetch {new} instead of {old}: fewer batches in flight",
            new=chosen.prefetch_factor,
            old=asked.prefetch_factor,
        )
    if chosen.num_workers != asked.num_workers:
        why["num_workers"] = say(
            "{workers} instead of {old}: each worker has its own batches in memory",
            workers=counted(chosen.num_workers, *WORKERS),
            old=asked.num_workers,
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
        num_workers=chosen.num_workers,
        prefetch_factor=chosen.prefetch_factor if chosen.num_workers else None,
        persistent_workers=chosen.persistent_workers and chosen.num_workers > 0,
        pin_memory=chosen.pin_memory,
        loader_kind=chosen.loader_kind,
        why=why,
    )


_SHARED = ("shm", "ram")


def bind(machine: Machine, job: Job) -> Job:
    """The job with its use of each GPU, and the pool that it will run out of first."""
    job = replace(job, held={**job.held, **_on_cards(machine, job)})
    shares: list[tuple[float, str, str]] = []
    for pool in machine.pools:
        ours = pool.name in _SHARED or (pool.name.startswith("gpu") and pool.name in job.held)
        if ours and pool.size and pool.free is not None:
            text = say("{free} of {size} free", free=format_size(pool.free), size=format_size(pool.size))
            shares.append((1 - pool.free / pool.size, pool.name, text))
    for process in job.processes:
        if process.fds is not None and process.fd_limit:
            text = say(
                "pid {pid} has {fds} of {limit} file descriptors open",
                pid=process.pid, fds=process.fds, limit=process.fd_limit,
            )  # fmt: skip
            shares.append((process.fds / process.fd_limit, "fds", text))
    if not shares:
        return replace(job, binds=None, binds_why=say("the sizes of all resources it uses are unknown"))
    share, name, text = max(shares)
    why = say("{name} is {share:.0%} used, {text}", name=name, share=share, text=text)
    return replace(job, binds=name, binds_why=why)


def _on_cards(machine: Machine, job: Job) -> dict[str, int | None]:
    """GPU memory of the job's processes, by GPU; None if the driver does not report it."""
    pids = {process.pid for process in job.processes}
    held: dict[str, int | None] = {}
    for card in machine.gpus.cards:
        ours = [process.used for process in card.processes or () if process.pid in pids]
        if ours:
            held[f"gpu{card.index}"] = None if None in ours else sum(used or 0 for used in ours)
    return held


TABLE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
_MOST_JOBS = 1 << 16


def plan_for(
    one: Workload, machine: Machine, *, gpus: int, jobs_per_gpu: int, held_shm: int = 0, held_ram: int = 0
) -> Plan:
    """The plan for ``jobs_per_gpu`` jobs like ``one`` on each of ``gpus``.

    ``held_shm`` and ``held_ram`` are used by running jobs of this kind, which are among the planned jobs.
    """
    room = _give_back(machine, held_shm, held_ram)
    others = None if machine.shm.used is None else max(0, machine.shm.used - held_shm)
    asked = need(_at(one, gpus, jobs_per_gpu))
    if not one.process_ram:
        asked = replace(asked, at_least=("ram",))
    rows = sorted({*TABLE, jobs_per_gpu})
    needs = {jobs: need(_at(one, gpus, jobs)) for jobs in rows}
    sizes = _sizes(asked, machine, others)
    verdict = fit(asked, room)
    return replace(
        verdict,
        sizes=sizes,
        table=tuple(
            PlanRow(jobs, gpus * jobs * one.processes, amount.shm, _sizes(amount, machine, others).recommended)
            for jobs, amount in needs.items()
        ),
        fits_now=_fits_now(one, room, gpus),
        fix=_fix(machine, sizes, asked),
        gpus=gpus,
        jobs_per_gpu=jobs_per_gpu,
        others=others,
        notes=(*_held_note(held_shm), *_notes(one, asked, machine, sizes, others)),
        machine=machine,
    )


def _at(one: Workload, gpus: int, jobs: int) -> Workload:
    """Jobs like ``one`` (whose processes are its ranks) on every GPU."""
    return replace(one, processes=gpus * jobs * one.processes, per_gpu=jobs * one.processes)


def _sizes(amount: Need, machine: Machine, others: int | None) -> ShmSizes:
    ram = machine.pool("ram")
    size = ram.size if ram else None
    bound = say("the cgroup's memory limit of") if machine.ram_limit is not None else say("the machine's RAM of")
    return advise(amount.shm + (others or 0), memory=size, processes=amount.ram - amount.shm, bound=bound)


def _fits_now(one: Workload, room: Machine, gpus: int) -> int | None:
    """The most jobs per GPU that fit now, by doubling and bisection."""

    def fits(jobs: int) -> bool | None:
        verdict = fit(need(_at(one, gpus, jobs)), room).verdict
        return None if verdict == "unknown" else verdict == "fits"

    first = fits(1)
    if not first:
        return None if first is None else 0
    low, high = 1, 2
    while fits(high):
        low, high = high, 2 * high
        if high > _MOST_JOBS:
            return None
    return low + bisect_left(range(low + 1, high), True, key=lambda jobs: not fits(jobs))


def _give_back(machine: Machine, shm: int, ram: int) -> Machine:
    """The machine without the measured running jobs, which are counted in the need."""
    back = {"shm": shm, "ram": ram + shm}
    return machine.with_free({
        pool.name: min(pool.free + back[pool.name], pool.size or pool.free)
        for pool in machine.pools if pool.name in back and pool.free is not None
    })  # fmt: skip


def _fix(machine: Machine, sizes: ShmSizes, asked: Need) -> tuple[str, ...]:
    """How to set the recommended size here, if it is not set already and is enough."""
    if machine.shm.size is not None and machine.shm.size >= sizes.recommended:
        return ()
    return enlarge_shm(machine.runtime, sizes.recommended) if sizes.recommended >= asked.shm else ()


def _held_note(held: int) -> tuple[str, ...]:
    if not held:
        return ()
    text = phrase("the measured jobs use {held} of /dev/shm now; this counts as free, because they are among the jobs")
    return (say(text, held=format_size(held)),)


def _notes(one: Workload, asked: Need, machine: Machine, sizes: ShmSizes, others: int | None) -> tuple[str, ...]:
    notes = []
    if not one.process_ram:
        notes.append(say("RAM of the processes is not included: process_ram='4GB' or measure=[PID] adds it"))
    if one.processes > 1 and not one.nccl:
        notes.append(say("NCCL's segments in /dev/shm are not included: nccl='33MB' or measure=[PID] adds them"))
    if others is None:
        notes.append(say("/dev/shm used by other processes is unknown: {why}", why=machine.shm.reason or "?"))
    if sizes.capped_by is not None:
        notes.append(say("sizes are capped by {why}: more would lead to an OOM kill", why=sizes.capped_by))
        wanted = asked.shm + (others or 0)
        if sizes.recommended < wanted:
            notes.append(
                say(
                    "{need} does not fit below that limit: run fewer jobs, or raise the limit", need=format_size(wanted)
                )
            )
    ram = machine.pool("ram")
    if ram is not None and ram.size is not None and sizes.recommended > ram.size // SHM_SHARE:
        notes.append(
            say(
                "{size} is more than a quarter of the {ram} of RAM; data in /dev/shm reduces the RAM for "
                "processes",
                size=format_size(sizes.recommended), ram=format_size(ram.size),
            )
        )  # fmt: skip
    return tuple(notes)
