"""A need that a trial run measured, in place of the predicted one.

Covers: the measured peaks as terms, what a trial that was stopped says of the pool it ran out of, growth beyond the
batches tried. Does not cover: running it (loader/measure/trial_guard.py), settings that were not tried (predict.py).

Pure.
"""

from __future__ import annotations

from dataclasses import replace

from legroom.budget.demand import Batch, Demand, loaders_of, workload_of
from legroom.budget.predict import batch_pages, need
from legroom.budget.settings import PAGE, semaphores
from legroom.model import Box, Need, Term, Trial
from legroom.units import format_size
from legroom.words import counted, phrase, say

_MARGIN, _MARGIN_BYTES = 64, 1 << 20  # a share of it, and bytes: no two runs take exactly the same
_SHORT = 4 << 20  # at least so much more is needed where a trial was stopped


def tried_need(demand: Demand, batch: Batch, trial: Trial, box: Box) -> Need:
    """What was measured, for every rank, with what the trial did not run: model, validation loader, checkpoints."""
    count = demand.ranks
    whole = workload_of(demand, batch, count, count)
    stated = 0 if demand.process_ram_source else demand.process_ram or 0
    rest = need(
        replace(
            whole,
            loaders=whole.loaders[1:],
            process_ram=max(0, stated - trial.process),
            worker_ram=demand.worker_ram,
        )
    )
    pinned = [term for term in need(replace(whole, loaders=whole.loaders[:1])).terms if term.pool == "pinned"]
    pinned_bytes = sum(term.bytes for term in pinned)
    source = _source(trial)
    trial = _filled(demand, batch, trial)
    ram = (trial.ram + trial.ram // _MARGIN + _MARGIN_BYTES) * count
    terms = [Term("ram", ram, _text(demand, trial), source)]
    if trial.short == "ram":
        ram = max(ram, (_room(box, "ram") or 0) + _SHORT)
        what = say("stopped when it had taken {taken}: it needs more", taken=format_size(trial.ram))
        terms = [Term("ram", ram, what, source)]
    if pinned_bytes:
        terms.append(
            Term("ram", pinned_bytes, say("pinned memory is memory too"), say("the sum of the pinned terms"))
        )
    shm = (trial.shm - overlap(demand, trial)[0]) * count
    if trial.short == "shm":
        shm = max(shm + batch_pages(loaders_of(demand, batch)[0].tensors), (_room(box, "shm") or 0) + PAGE)
    if shm:
        terms.append(Term("shm", shm, say("batches and semaphores at their peak"), source))
    fds, what = trial.fds, say("open files of the main process")
    if trial.short == "fds":  # workers hold a descriptor too for each tensor that they have not handed over
        fds, what = max(fds, (_room(box, "fds") or 0) + 1), say("open files of one of its processes")
    terms.append(Term("fds", fds, what, source))
    return Need(
        terms=tuple(term for term in (*terms, *pinned, *rest.terms) if term.bytes),
        shm=shm + rest.shm,
        ram=ram + pinned_bytes + rest.ram,
        pinned=pinned_bytes + rest.pinned,
        fds=fds + rest.fds,
        disk=rest.disk,
        gpu=rest.gpu,
    )


def _filled(demand: Demand, batch: Batch, trial: Trial) -> Trial:
    """The trial with full queues, where they were not seen full: its workers waited for something else than a CPU."""
    if demand.kind != "torch" or not demand.workers or trial.filled:
        return trial
    loader = loaders_of(demand, batch)[0]
    ahead = demand.workers * demand.prefetch
    batches = trial.batches if trial.whole else loader.batches
    if batches is not None:
        ahead = min(ahead, batches - 1)
    missing = (ahead + 1) * batch_pages(loader.tensors) - trial.shm
    if missing <= 0:
        return trial
    return replace(trial, shm=trial.shm + missing, ram=trial.ram + missing)


def overlap(demand: Demand, trial: Trial) -> tuple[int, int]:
    """Bytes of semaphores of one epoch that were there beside those of the next, and how many there can be.

    Workers that start again for every epoch come with semaphores of their own, before all threads that hold those of
    the last epoch have ended. How many overlap is a matter of timing. It shows only where nothing else is in /dev/shm.
    """
    once = semaphores(demand.workers) // 2 * PAGE
    if demand.persistent or not demand.workers or not once <= trial.shm <= 2 * once:
        return 0, 0
    seen = trial.shm - once
    return seen, max(seen + PAGE * trial.overlap, (demand.workers + 1) * PAGE)


def calibrated(demand: Demand, batch: Batch, measured: Need) -> Batch:
    """The batch with as much private memory in the making as brings the prediction to what was measured."""
    predicted = need(workload_of(demand, batch, demand.ranks, demand.ranks)).ram
    makers = max(1, demand.workers) * demand.ranks
    making = sum(batch.tensors) if batch.making is None else batch.making
    return replace(batch, making=max(making, making + (measured.ram - predicted) // makers))


def may_grow(demand: Demand, batch: Batch, trial: Trial, *, forked: bool) -> int | None:
    """Bytes that batches which were not tried can add, going on as it grew; None: no end can be seen."""
    if trial.whole or not trial.growth:
        return 0
    copied = trial.process * demand.workers if forked and demand.workers else None
    if batch.rows is None:
        return copied
    left = max(0, -(-batch.rows // (batch.samples * demand.ranks)) - trial.batches)
    further = trial.growth * -(-left // max(1, trial.growth_batches))
    return further if copied is None else min(further, copied)


def _text(demand: Demand, trial: Trial) -> str:
    workers = counted(demand.workers, phrase("{count} worker"), phrase("{count} workers"))
    if trial.forked:
        return say(
            "what a loop with {workers} adds to this process at its peak, over {batches} batches an epoch, and a "
            "margin",
            workers=workers, batches=trial.batches,
        )  # fmt: skip
    return say(
        "the process and {workers} at their peak, over {batches} batches an epoch, and a margin",
        workers=workers, batches=trial.batches,
    )  # fmt: skip


def _source(trial: Trial) -> str:
    if trial.whole:
        return say("measured: a trial run of two epochs here")
    return say("measured: a trial run here, the start of two epochs")


def _room(box: Box, name: str) -> int | None:
    pool = box.pool(name)
    if pool is None:
        return None
    return pool.size if name == "fds" and pool.free is None else pool.free
