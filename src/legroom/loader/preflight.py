"""`legroom.check`: whether this training survives on this box, before it starts.

Covers: drawing a batch from a dataset where one is given, the disk that checkpoints go to, the verdict with the
largest settings that fit. Does not cover: the arithmetic (budget), drawing itself (measure.py, apart.py).
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from legroom.advice.fit import fit, fits, judged, largest_batch, largest_settings
from legroom.advice.memory_need import calibrated, may_grow, overlap, tried_need
from legroom.advice.plan_inputs import Batch, Demand, batch_of, data_rows
from legroom.errors import DatasetOutOfMemory, UsageError
from legroom.loader.bare_demand import with_bare_processes
from legroom.loader.measure.guarded import RESERVE
from legroom.loader.measure.private import private_bytes
from legroom.loader.measure.private import start_method as start_method_here
from legroom.probe.filesystem import disk_at
from legroom.probe.host import Host
from legroom.probe.snapshot import snapshot
from legroom.records import Box, Measured, Need, Plan, Pool, Term, Trial
from legroom.system.argument_checks import check_integer
from legroom.system.libc import malloc_trim
from legroom.units import format_size, parse_size
from legroom.words import say

_TIMEOUT = 60.0
_LEAST_S = 1.0  # for the trial run, however long the drawing took
_TRIAL_S = 8.0  # for the batches of a trial run, beyond the few that it needs


def check(
    dataset: Any = None,
    *,
    batch_size: int,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    collate_fn: Callable[[Any], Any] | str | None = None,
    loader: Literal["torch", "legroom"] = "torch",
    data: str | os.PathLike[str] | None = None,
    keys: str | Iterable[str] | None = None,
    sample_bytes: int | str | None = None,
    val_batch: int | None = None,
    val_workers: int | None = None,
    ranks: int = 1,
    per_process: int | str | None = None,
    process_ram: int | str | None = None,
    params: int = 0,
    optimizer: str = "none",
    dtype: str = "float32",
    checkpoint_dir: str | os.PathLike[str] | None = None,
    checkpoint_bytes: int | str = 0,
    start_method: Literal["fork", "spawn", "forkserver"] | None = None,
    timeout: float = _TIMEOUT,
    host: Host | None = None,
    leaving: bool = False,
) -> Plan:
    """Whether a training with these settings fits this machine now; ``verdict`` is fits, too-big or unknown.

    The bytes of a batch come from ``dataset`` (an object, or ``"module:object"``), from a ``data`` file's description,
    or from ``sample_bytes``. Sizes are bytes or texts. On Linux a child process draws from the dataset, and another
    runs the loader; both are stopped while memory is left. For an object they are forks of this process, and the need
    is what the loader adds to it.

    Args:
        dataset: A dataset, or the name of one: the surest source.
        batch_size: Samples a batch.
        num_workers: Of the loader.
        prefetch_factor: Batches that each worker keeps ready.
        persistent_workers: Whether its workers live on from epoch to epoch.
        pin_memory: Whether it pins its batches.
        collate_fn: The dataset's own collate function, or the name of one.
        loader: Whose DataLoader: ``"torch"`` or ``"legroom"``.
        data: A data file; its description is read, its data are not.
        keys: Only these arrays of it.
        sample_bytes: Bytes of one sample.
        val_batch: Samples a batch of a validation loader that is alive beside it.
        val_workers: That loader's workers; None: there is none.
        ranks: Processes of this training on this box.
        per_process: What each holds of ``/dev/shm`` besides its loaders.
        process_ram: Private memory of one process.
        params: Parameters of a model that is kept on the host.
        optimizer: Whose state is kept there too.
        dtype: Of those parameters.
        checkpoint_dir: Where checkpoints go: that disk is held against ``checkpoint_bytes``.
        checkpoint_bytes: Of all checkpoints that are kept, of one process.
        start_method: How the loader's workers start; None: as this Python starts them.
        timeout: Seconds for drawing and the trial run together; the answer is ``unknown`` where they do not suffice.
        host: Where to read; None is this machine.
        leaving: This process ends before the training starts, so what it holds counts as free.
    """
    host = host or Host()
    checkpoint = parse_size(checkpoint_bytes)
    if checkpoint and checkpoint_dir is None:
        raise UsageError(
            say("checkpoints of {size} bytes, and no place for them", size=checkpoint),
            fix=(say("give the directory they go to"),),
        )
    _require_directory(host, checkpoint_dir)
    demand = Demand(
        workers=num_workers, prefetch=prefetch_factor, persistent=persistent_workers, pin_memory=pin_memory,
        kind=loader, val_batch=val_batch,
        val_workers=val_workers, ranks=ranks, per_process=None if per_process is None else parse_size(per_process),
        process_ram=None if process_ram is None else parse_size(process_ram), params=params,
        optimizer=optimizer, dtype=dtype, checkpoint=checkpoint, start_method=start_method,
    )  # fmt: skip
    deadline = time.monotonic() + timeout
    measured: Measured | None = None
    trial: Trial | None = None
    tries = True
    # Below another root other processes would run, and elsewhere memory cannot be watched.
    here = host.live and host.root == Path("/") and host.platform == "linux"
    if dataset is not None:
        _only(data, sample_bytes)
        try:
            if leaving and (before := _tried_before(dataset, timeout)):
                measured, trial = before
            else:
                measured, tries = _drawn(dataset, batch_size, collate_fn, demand, timeout, here=here)
        except DatasetOutOfMemory as problem:  # measuring takes more than the loop itself: that one decides
            if not here:
                return _nothing_fits(_room_here(host, leaving=False), problem)
        malloc_trim()  # what was drawn is not needed any more, and must not be in the figures
        batch = _measured_batch(measured, batch_size)
        demand = _with_processes(demand, measured, named=isinstance(dataset, str))
    else:
        batch = _stated(data, keys, sample_bytes, batch_size)
        if here and leaving and (before := _tried_before("", timeout)):
            _, trial = before
    box = _with_checkpoints(_room_here(host, leaving=leaving and here), host, checkpoint_dir)
    if trial is None and here and tries and _worth_trying(batch, box):
        left = max(_LEAST_S, deadline - time.monotonic())
        trial = _tried(dataset, collate_fn, demand, batch, measured, left, leaving=leaving)
    if trial is None:
        if dataset is None and here:
            demand = with_bare_processes(demand, timeout)
        verdict = judged(demand, batch, box)
    else:
        demand = _with_tried_process(demand, trial)
        verdict, batch = _judged_by_trial(demand, batch, trial, box)
    fitting = None if trial is None else verdict.verdict == "fits"
    known = dataset is None or measured is not None  # what other settings would take
    return replace(
        verdict,
        fix=(*_another_way(demand, batch, box, verdict), *verdict.fix),
        settings=largest_settings(demand, batch, box, fitting=fitting) if known or fitting else None,
        largest_batch=largest_batch(demand, batch, box) if known else batch_size if fitting else 0,
        notes=(*verdict.notes, *_notes(demand, measured, data, trial, tries=tries or not here)),
        box=box,
    )


def _measured_batch(measured: Measured | None, batch_size: int) -> Batch:
    if measured is None:
        return Batch((0,), batch_size, say("not measured: there was too little memory to"))
    drawn = Batch(
        measured.tensors, measured.batch_size, measured.source, measured.rows, measured.making, measured.each
    )
    return drawn.of(_samples_in(batch_size, measured.rows))


def _nothing_fits(box: Box, problem: DatasetOutOfMemory) -> Plan:
    """The verdict where not even the dataset and a few samples of it fit."""
    free = next((pool.free for pool in box.pools if pool.name == problem.pool), None) or 0
    term = Term(
        problem.pool, max(problem.taken, free + RESERVE), problem.why or str(problem), say("measured")
    )
    amounts = {"shm": 0, "ram": 0, "pinned": 0, "fds": 0, "disk": 0, problem.pool: term.bytes}
    return replace(fit(Need((term,), **amounts), box), largest_batch=0, box=box)


def _samples_in(batch_size: int, rows: int | None) -> int:
    """Of the largest batch that the data give."""
    return batch_size if not rows else min(batch_size, rows)


def _room_here(host: Host, *, leaving: bool) -> Box:
    """The machine as a training will find it: without this process, where that ends before."""
    box = snapshot(host)
    own = private_bytes() if leaving else None
    if not own:
        return box
    pools = tuple(
        replace(pool, free=min(pool.free + own, pool.size or pool.free))
        if pool.name == "ram" and pool.free is not None
        else pool
        for pool in box.pools
    )
    return replace(box, pools=pools)


def _worth_trying(batch: Batch, box: Box) -> bool:
    """Whether one batch fits at all. The trial run itself is guarded.

    What drawing took of the process is no reason to leave the trial out: measured along with the measuring code, it can
    be 40 % more than the loop takes.
    """
    ram = box.pool("ram")
    return ram is None or ram.free is None or sum(batch.tensors) < ram.free


def _tried_before(dataset: Any, timeout: float) -> tuple[Measured | None, Trial] | None:
    from legroom.loader.measure.trial_guard import tried_before

    return tried_before(dataset, timeout) if isinstance(dataset, str) else None


def _tried(
    dataset: Any,
    collate: Any,
    demand: Demand,
    batch: Batch,
    measured: Measured | None,
    timeout: float,
    *,
    leaving: bool,
) -> Trial | None:
    """A trial run of the dataset, or of tensors of the stated sizes; None where torch is not installed."""
    from legroom.loader.measure.trial_guard import try_named, try_object, why_not

    if why_not() is not None:
        return None
    least = demand.workers * (demand.prefetch + 4) + 4  # batches, where the number of samples is not known
    sizes = [-(-size // batch.samples) for size in batch.tensors]
    stated = (
        {"sizes": sizes, "samples": min(batch.rows or 1 << 62, batch.samples * least)}
        if dataset is None
        else {}
    )
    asked = {
        "kind": demand.kind, "batch_size": batch.samples, "workers": demand.workers, "prefetch": demand.prefetch,
        "persistent": demand.persistent, "start_method": demand.start_method, "seconds": min(_TRIAL_S, timeout / 4),
        "batch_seconds": _seconds(measured, batch),
    }  # fmt: skip
    if dataset is not None and not isinstance(dataset, str):
        return try_object(dataset, collate, timeout=timeout, **asked)
    return try_named(
        dataset or "", collate, timeout=timeout, leaving=leaving, measured=measured, **asked, **stated
    )


def _seconds(measured: Measured | None, batch: Batch) -> float:
    """Until a worker has made a batch, where that is known."""
    if measured is None:
        return 0.0
    return (
        measured.sample_seconds * batch.samples
        + measured.collate_seconds * batch.samples / measured.batch_size
    )


def _with_tried_process(demand: Demand, trial: Trial) -> Demand:
    """The demand with the process of the trial run, for settings that were not tried."""
    if demand.process_ram is not None or trial.forked:  # the process that asked is there already
        return demand
    return replace(
        demand, process_ram=trial.process, process_ram_source=say("measured: the process of a trial run")
    )


def _judged_by_trial(demand: Demand, batch: Batch, trial: Trial, box: Box) -> tuple[Plan, Batch]:
    """The verdict by what a trial run took, and the batch with what its making takes, for other settings."""
    taken = tried_need(demand, batch, trial, box)
    verdict = fit(taken, box)
    batch = calibrated(demand, batch, taken)
    if verdict.verdict == "too-big":
        return verdict, batch
    if trial.unfinished is not None:
        why = say(
            "{why}; it had taken {taken} by then, and can take more", why=trial.unfinished,
            taken=format_size(trial.ram),
        )  # fmt: skip
        return _not_covered(verdict, "ram", "trial-unfinished", why), batch
    shm = box.pool("shm")
    most = taken.shm + overlap(demand, trial)[1] * demand.ranks
    if trial.overlap or (shm is not None and shm.free is not None and most > shm.free):
        why = say(
            "workers start again for every epoch, and semaphores of two epochs can overlap: it needs {need} to {most}, "
            "depending on timing; persistent_workers avoids that",
            need=format_size(taken.shm), most=format_size(most),
        )  # fmt: skip
        return _not_covered(verdict, "shm", "epoch-overlap", why), batch
    more = may_grow(demand, batch, trial, forked=(demand.start_method or start_method_here()) == "fork")
    ram = box.pool("ram")
    if more is None or (ram is not None and ram.free is not None and taken.ram + more > ram.free):
        why = say(
            "it grew by {grown} over the last {count} batches of the trial run, and did not stop growing: the need of "
            "{need} can be too low by {more}",
            grown=format_size(trial.growth), count=trial.growth_batches, need=format_size(taken.ram),
            more=say("any amount") if more is None else format_size(more),
        )  # fmt: skip
        return _not_covered(verdict, "ram", "still-growing", why), batch
    return verdict, batch


def _not_covered(verdict: Plan, pool: str, code: str, why: str) -> Plan:
    return replace(verdict, verdict="unknown", unknown={**verdict.unknown, pool: why}, codes={pool: code})


def _only(data: object, sample_bytes: object) -> None:
    if data is not None or sample_bytes is not None:
        raise UsageError(
            say("a dataset to draw from, and its bytes stated as well"),
            fix=(say("give one of: a dataset, a data file, the bytes of a sample"),),
        )


def _drawn(
    dataset: Any,
    batch_size: int,
    collate_fn: Callable[[Any], Any] | str | None,
    demand: Demand,
    timeout: float,
    *,
    here: bool,
) -> tuple[Measured, bool]:
    """What was drawn, and whether the loader can be tried."""
    from legroom.loader.measure.apart import measure_dataset, measure_object
    from legroom.loader.measure.measuring import measure

    method = demand.start_method
    if isinstance(dataset, str):
        if collate_fn is not None and not isinstance(collate_fn, str):
            raise UsageError(
                say("the dataset is named and drawn from in a child: its collate function must be named too"),
                fix=(say('collate_fn="module:function", or give the dataset itself'),),
            )
        found = measure_dataset(
            dataset, batch_size=batch_size, collate=collate_fn, timeout=timeout, method=method
        )
        return found, True
    if isinstance(collate_fn, str):
        raise UsageError(
            say("the dataset is an object: its collate function must be an object too, not a name"),
            fix=(say("give the function itself"),),
        )
    batch_size = check_integer("batch_size", batch_size, 1)
    how: dict[str, Any] = {"batch_size": batch_size, "collate_fn": collate_fn, "method": method}
    drawn = measure_object(dataset, timeout=timeout, **how) if here else None
    if drawn is None:  # it raised in the fork: here it raises the same, or it cannot be forked (CUDA cannot)
        return measure(dataset, **how), False
    if (method or start_method_here()) != "fork":  # each worker holds what this process holds, at the most
        drawn = replace(drawn, idle_worker=private_bytes())
    return drawn, True


def _with_processes(demand: Demand, measured: Measured | None, *, named: bool) -> Demand:
    """The demand with what was measured of the processes: each worker, and the training where it is not this one."""
    if measured is None:
        return demand
    way = measured.transport
    worker = measured.idle_worker if way is None or way.worker_ram is None else way.worker_ram
    if demand.workers and worker is not None:
        demand = replace(demand, worker_ram=max(worker, measured.idle_worker or 0))
    if named and demand.process_ram is None and measured.process_ram is not None:
        source = say("the process that measured")
        demand = replace(demand, process_ram=measured.process_ram, process_ram_source=source)
    return demand


def _stated(
    data: str | os.PathLike[str] | None,
    keys: str | Iterable[str] | None,
    sample_bytes: int | str | None,
    batch_size: int,
) -> Batch:
    if (data is None) == (sample_bytes is None):
        raise UsageError(
            say("the bytes of a batch are not known")
            if data is None
            else say("a data file, and the bytes of a sample stated as well"),
            fix=(say("give one of: a dataset, a data file, the bytes of a sample"),),
        )
    if sample_bytes is not None:
        return batch_of(parse_size(sample_bytes), batch_size)
    assert data is not None
    rows = data_rows(data, keys)
    return rows.batch(_samples_in(batch_size, rows.rows))


def _require_directory(host: Host, folder: str | os.PathLike[str] | None) -> None:
    """Checkpoints that go nowhere do not fit anywhere."""
    if folder is None or not host.live:
        return
    path = Path(folder) if host.root == Path("/") else host.path(os.fspath(folder))
    if not path.is_dir():
        raise UsageError(
            say("there is no directory {folder} for checkpoints", folder=os.fspath(folder)),
            why=say("which disk they would go to, and whether they may be written there, cannot be told"),
            fix=(
                say("make it first:\nmkdir -p {folder}", folder=shlex.quote(os.fspath(folder))),
                say("or give the directory that they will go to"),
            ),
        )


def _with_checkpoints(box: Box, host: Host, folder: str | os.PathLike[str] | None) -> Box:
    """The box whose disk is the one that checkpoints go to."""
    if folder is None:
        return box
    disk = disk_at(host, "checkpoints", os.fspath(folder))
    source = say("statvfs {path}", path=disk.path)
    pool = Pool("disk", disk.size, disk.used, disk.free, source, disk.reason)
    others = tuple(one for one in box.disks if one.role != "store")
    return replace(
        box,
        pools=tuple(pool if one.name == "disk" else one for one in box.pools),
        disks=(replace(disk, role="store"), *others),
    )


def _another_way(demand: Demand, batch: Batch, box: Box, verdict: Plan) -> tuple[str, ...]:
    """Our loader's batches are not in /dev/shm: where that alone would do, say so first."""
    if demand.kind == "legroom" or not any(problem.pool == "shm" for problem in verdict.problems):
        return ()
    if not fits(replace(demand, kind="legroom"), batch, box):
        return ()
    return (say("legroom.DataLoader with these settings fits: its batches do not lie in /dev/shm"),)


def _notes(
    demand: Demand, measured: Measured | None, data: object, trial: Trial | None, *, tries: bool
) -> tuple[str, ...]:
    notes = []
    if trial is None and demand.process_ram is None and not demand.params:
        notes.append(say("RAM of the training process itself was not stated: it is not counted"))
    if trial is None and demand.workers and not demand.worker_ram:
        notes.append(say("the memory of a worker itself was not measured: it is not counted"))
    if demand.worker_ram_source:
        notes.append(say("what the dataset itself holds in memory is not known: it is not counted"))
    if trial is None and demand.workers:
        notes.append(
            say(
                "predicted, not tried: torch's workers can hold many times as much where samples are 1 to 32 MB, or "
                "where the dataset is a Python list; check --dataset MODULE:OBJECT tries it"
            )
        )
    if not tries:
        notes.append(
            say(
                "not tried: the dataset raised an error in a fork of this process, and none in the process itself"
            )
        )
    if data is not None:
        notes.append(say("batches are counted as the rows lie in the file, before any transform"))
    if measured is not None and measured.unsendable and demand.workers:
        notes.append(say("a batch cannot come from a worker: {why}", why=measured.unsendable))
    return tuple(notes)
