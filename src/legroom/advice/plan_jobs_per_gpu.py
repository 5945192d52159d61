"""The need of N jobs per GPU: three sizes for /dev/shm, a table, and how many jobs fit now.

Scales one job to GPUs × jobs, adds what other processes use, and caps sizes by RAM.
"""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import replace

from legroom.advice.fit_on_machine import advise, fit
from legroom.advice.fix_commands import SHM_SHARE, enlarge_shm
from legroom.advice.memory_need import need
from legroom.messages import phrase, say
from legroom.records.machine import Machine
from legroom.records.workload import Need, Plan, PlanRow, ShmSizes, Workload
from legroom.units import format_size

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
