"""How big a box a workload needs: the need for so many jobs, three sizes, a table, and how many fit now.

Covers: scaling one job to GPUs × jobs, others' use added in, the cap that memory puts on /dev/shm. Does not cover:
finding out what one job takes (planning.py gathers that), printing (cli).

Pure: the same Box gives the same Plan.
"""

from __future__ import annotations

from dataclasses import replace

from legroom.advice.fit import advise, fit
from legroom.advice.memory_need import need
from legroom.advice.remedies import SHM_SHARE, enlarge_shm
from legroom.records import Box, Need, Plan, PlanRow, ShmSizes, Workload
from legroom.units import format_size
from legroom.words import phrase, say

TABLE = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12)
_MOST_JOBS = 1 << 16


def plan_for(
    one: Workload, box: Box, *, gpus: int, jobs_per_gpu: int, held_shm: int = 0, held_ram: int = 0
) -> Plan:
    """The plan for ``jobs_per_gpu`` jobs like ``one`` on each of ``gpus``.

    ``held_shm`` and ``held_ram`` are what running jobs of this kind hold already: that room is theirs to use again.
    """
    room = _give_back(box, held_shm, held_ram)
    others = None if box.shm.used is None else max(0, box.shm.used - held_shm)
    asked = need(_at(one, gpus, jobs_per_gpu))
    rows = sorted({*TABLE, jobs_per_gpu})
    needs = {jobs: need(_at(one, gpus, jobs)) for jobs in rows}
    sizes = _sizes(asked, box, others)
    verdict = fit(asked, room)
    return replace(
        verdict,
        sizes=sizes,
        table=tuple(
            PlanRow(jobs, gpus * jobs * one.processes, amount.shm, _sizes(amount, box, others).recommended)
            for jobs, amount in needs.items()
        ),
        fits_now=_fits_now(one, room, gpus),
        fix=_fix(box, sizes, asked),
        gpus=gpus,
        jobs_per_gpu=jobs_per_gpu,
        others=others,
        notes=(*_held_note(held_shm), *_notes(one, asked, box, sizes, others)),
        box=box,
    )


def _at(one: Workload, gpus: int, jobs: int) -> Workload:
    """Jobs like ``one`` (whose processes are its ranks) on every GPU."""
    return replace(one, processes=gpus * jobs * one.processes, per_gpu=jobs * one.processes)


def _sizes(amount: Need, box: Box, others: int | None) -> ShmSizes:
    ram = box.pool("ram")
    size = ram.size if ram else None
    by_cgroup = size is not None and (box.memory.total is None or size < box.memory.total)
    bound = say("the cgroup's memory limit of") if by_cgroup else say("the machine's RAM of")
    return advise(amount.shm + (others or 0), memory=size, processes=amount.ram - amount.shm, bound=bound)


def _fits_now(one: Workload, room: Box, gpus: int) -> int | None:
    """The most jobs a GPU that fit what is free: grows by doubling, then halves the gap."""

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
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _give_back(box: Box, shm: int, ram: int) -> Box:
    """The box as it will be when the running jobs, which are counted in the need, have made room."""
    back = {"shm": shm, "ram": ram + shm}
    pools = tuple(
        pool
        if pool.free is None or not back.get(pool.name)
        else replace(pool, free=min(pool.free + back[pool.name], pool.size or pool.free))
        for pool in box.pools
    )
    return replace(box, pools=pools)


def _fix(box: Box, sizes: ShmSizes, asked: Need) -> tuple[str, ...]:
    """How to set the recommended size here, where it is not set already and would do."""
    if box.shm.size is not None and box.shm.size >= sizes.recommended:
        return ()
    return enlarge_shm(box.place, sizes.recommended) if sizes.recommended >= asked.shm else ()


def _held_note(held: int) -> tuple[str, ...]:
    if not held:
        return ()
    text = phrase(
        "the {held} that the measured ones hold in /dev/shm now count as room: they are among the jobs"
    )
    return (say(text, held=format_size(held)),)


def _notes(one: Workload, asked: Need, box: Box, sizes: ShmSizes, others: int | None) -> tuple[str, ...]:
    notes = []
    if not one.process_ram:
        notes.append(
            say("RAM of the processes themselves was neither measured nor stated: it is not counted")
        )
    if one.processes > 1 and not one.nccl:
        notes.append(
            say("NCCL's own segments in /dev/shm are not counted: measure a running job, or state them")
        )
    if others is None:
        notes.append(say("what others hold in /dev/shm is unknown: {why}", why=box.shm.reason or "?"))
    if sizes.capped_by is not None:
        notes.append(
            say("advice is capped by {why}: more would be an OOM kill, not room", why=sizes.capped_by)
        )
        wanted = asked.shm + (others or 0)
        if sizes.recommended < wanted:
            notes.append(
                say(
                    "{need} cannot be had below that limit: fewer jobs, or a higher limit",
                    need=format_size(wanted),
                )
            )
    ram = box.pool("ram")
    if ram is not None and ram.size is not None and sizes.recommended > ram.size // SHM_SHARE:
        notes.append(
            say(
                "{size} is more than a quarter of the {ram} of RAM: what fills it is missing elsewhere",
                size=format_size(sizes.recommended), ram=format_size(ram.size),
            )
        )  # fmt: skip
    return tuple(notes)
