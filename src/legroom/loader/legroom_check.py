"""``legroom.check``: predicts whether a training run fits on this machine, before it starts.

Measures the dataset if one is given, runs the DataLoader for a trial, and compares the need with the free memory and
the disk for checkpoints. The arithmetic is in ``legroom.advice``.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from legroom.advice.findings_copy_on_write import copied_attributes, finding_of_dataset
from legroom.advice.fit_on_machine import fit, fits, judged, largest_batch, largest_settings
from legroom.advice.job_settings_to_workload import Batch, Demand, batch_of, data_rows
from legroom.advice.memory_need import (
    calibrated,
    collected,
    may_grow,
    overlap,
    tried_need,
    with_overlap,
    without_overlap,
)
from legroom.errors import DatasetOutOfMemory, UsageError
from legroom.loader.measure.dataset_bytes_and_seconds import measure
from legroom.loader.measure.import_dataset import FoundDataset, chosen_batch_size, open_loader
from legroom.loader.measure.measure_in_child import measure_dataset, measure_object, tried_before, try_named, try_object
from legroom.loader.measure.memory_guard_script import RESERVE
from legroom.loader.measure_process_memory import private_bytes, with_bare_processes
from legroom.loader.measure_process_memory import start_method as default_start_method
from legroom.loader.settings_of_checked_dataloader import ANY_LOADER, settings_to_check, taken_from_dataloader
from legroom.messages import counted, phrase, say
from legroom.probe.filesystems_and_cgroups import disk_at
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.snapshot import snapshot
from legroom.records.finding_and_alarm import Finding
from legroom.records.machine import Machine, Pool
from legroom.records.workload import LoaderTrial, Measured, Need, Plan, Term
from legroom.system.argument_checks import check_arguments, check_integer, check_seconds
from legroom.system.processes_and_threads import malloc_trim
from legroom.units import format_size, parse_size

# Set by the command line, which has nothing else to do: a guard may take this process's place and start it again.
may_be_replaced = False

_TIMEOUT = 60.0
_LEAST_S = 1.0  # for the trial run, however long the measurement took
_TRIAL_S = 8.0  # for the batches of a trial run, beyond the few that it needs

# These have checks of their own: sizes, and what `Demand` checks.
_CHECKED = ("sample_bytes", "per_process", "process_ram", "checkpoint_bytes", "optimizer", "dtype")


def check(
    dataset: Any = None,
    *,
    batch_size: int | None = None,
    num_workers: int | None = None,
    prefetch_factor: int | None = None,
    persistent_workers: bool | None = None,
    pin_memory: bool | None = None,
    collate_fn: Callable[[Any], Any] | str | None = None,
    loader: Literal["torch", "legroom"] | None = None,
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
    """Predict whether a training run with these settings fits on this machine now.

    ``verdict`` is ``fits``, ``too-big`` or ``unknown``. The size of a batch comes from ``dataset`` (an object, or
    ``"module:object"``), from the header of a ``data`` file, or from ``sample_bytes``. If ``dataset`` is a DataLoader,
    settings that are not given are its own. Sizes are bytes or strings such as ``"64MB"``.

    On Linux one child process reads samples and another runs the DataLoader; both are stopped
    before memory runs out. For a dataset object they are forks of this process, and the need is what the DataLoader
    adds to it.

    Args:
        dataset: A dataset or a DataLoader, or its name as ``"module:object"``: the most accurate source.
        batch_size: Samples per batch; None: that of the DataLoader.
        num_workers: ``num_workers`` of the DataLoader; None: as ``dataset`` has it, else torch's default. So are the
            next three.
        prefetch_factor: ``prefetch_factor`` of the DataLoader.
        persistent_workers: ``persistent_workers`` of the DataLoader.
        pin_memory: ``pin_memory`` of the DataLoader.
        collate_fn: The collate function, or its name; None: that of the DataLoader, or torch's ``default_collate``.
        loader: The DataLoader that will run: ``"torch"`` or ``"legroom"``; None: as ``dataset`` is, else torch's.
        data: A data file; only its header is read.
        keys: Use only these arrays of the file.
        sample_bytes: Size of one sample.
        val_batch: Batch size of a validation DataLoader that is alive at the same time.
        val_workers: Its ``num_workers``; None: there is no validation DataLoader.
        ranks: Processes per job on this machine.
        per_process: ``/dev/shm`` use of each process, without its DataLoaders.
        process_ram: Private memory of one process.
        params: Number of model parameters kept in host memory.
        optimizer: The optimizer whose state is kept in host memory.
        dtype: Data type of those parameters.
        checkpoint_dir: Directory for checkpoints; free space on its disk is compared with ``checkpoint_bytes``.
        checkpoint_bytes: Size of all checkpoints that one process keeps.
        start_method: Start method of the workers; None: that of the DataLoader, or Python's default.
        timeout: Time limit in seconds for reading samples and the trial run together; then the verdict is ``unknown``.
        host: The machine to read; None is this one.
        leaving: This process exits before the training run starts, so its memory counts as free.
    """
    check_arguments(check, locals(), _CHECKED)
    timeout = check_seconds("timeout", timeout)
    host = host or Host()
    checkpoint = parse_size(checkpoint_bytes)
    if checkpoint and checkpoint_dir is None:
        raise UsageError(
            say("the size of checkpoints is {size} bytes, but their directory is not given", size=checkpoint),
            fix=(say("also pass the directory: checkpoint_dir='DIRECTORY'"),),
        )
    _require_directory(host, checkpoint_dir)
    given: dict[str, Any] = {
        "batch_size": batch_size, "num_workers": num_workers, "prefetch_factor": prefetch_factor,
        "persistent_workers": persistent_workers, "pin_memory": pin_memory, "loader": loader,
        "start_method": start_method, "collate_fn": collate_fn,
    }  # fmt: skip

    def demanded(own: Mapping[str, Any] | None) -> Demand:
        """The job, with the settings of that DataLoader where none are given."""
        chosen = settings_to_check(given, own, val_workers)
        return Demand(
            num_workers=chosen["num_workers"], prefetch_factor=chosen["prefetch_factor"],
            persistent_workers=chosen["persistent_workers"], pin_memory=chosen["pin_memory"],
            loader_kind=chosen["loader"], multiprocessing_context=chosen["start_method"], val_batch=val_batch,
            val_workers=val_workers, ranks=ranks, per_process=None if per_process is None else parse_size(per_process),
            process_ram=None if process_ram is None else parse_size(process_ram), params=params,
            optimizer=optimizer, dtype=dtype, checkpoint=checkpoint,
        )  # fmt: skip

    # Wrong numbers are refused before anything is imported, and again when the settings of the DataLoader are known.
    for name, least in _COUNTS.items():
        if given[name] is not None:
            given[name] = check_integer(name, given[name], least)
    opened = FoundDataset(dataset, None) if isinstance(dataset, str) else open_loader(dataset)
    own: Mapping[str, Any] | None = opened.settings
    known = not isinstance(dataset, str)
    demand = demanded(own if known else ANY_LOADER)
    deadline = time.monotonic() + timeout
    measured: Measured | None = None
    trial: LoaderTrial | None = None
    tries = True
    # With another root, other processes would run. On other systems memory cannot be watched.
    here = host.live and host.root == Path("/") and host.platform == "linux"
    restarts = leaving and may_be_replaced
    if dataset is not None:
        _require_dataset_alone(data, sample_bytes)
        try:
            if restarts and isinstance(dataset, str) and (before := tried_before(dataset, timeout)):
                measured, own, trial = before
            else:
                measured, tries = _measure(opened, batch_size, collate_fn, start_method, timeout, here=here)
                own = measured.loader
            known = True
        except DatasetOutOfMemory as problem:  # measuring needs more than the trial run, which decides
            if not known:
                own, known = problem.loader, problem.found
            if not here or (batch_size is None and not known):
                return _dataset_does_not_fit(_machine_for_run(host, leaving=False), problem)
        demand, batch_size = demanded(own), chosen_batch_size(given["batch_size"], own)
        malloc_trim()  # the samples are not needed any more, and must not be counted
        batch = _measured_batch(measured, batch_size, ranks)
        demand = _with_processes(demand, measured, named=isinstance(dataset, str))
    else:
        if batch_size is None:
            raise UsageError(say("the batch size is missing"), fix=(say("pass batch_size="),))
        batch = _given_batch(data, keys, sample_bytes, batch_size)
        if here and restarts and (before := tried_before("", timeout)):
            _, _, trial = before
    machine = _with_checkpoints(_machine_for_run(host, leaving=leaving and here), host, checkpoint_dir)
    if trial is None and here and tries and _one_batch_fits(batch, machine):
        left = max(_LEAST_S, deadline - time.monotonic())
        trial = _tried(opened, collate_fn, demand, batch, measured, left, own=own if known else None, known=known,
                       leaving=restarts)  # fmt: skip
    if trial is None:
        if dataset is None and here:
            demand = with_bare_processes(demand, timeout)
        verdict = judged(demand, batch, machine)
    else:
        demand = _with_tried_process(demand, trial)
        verdict, batch = _judged_by_trial(demand, batch, trial, machine, _seconds(measured, batch))
    fitting = None if trial is None else verdict.verdict == "fits"
    known = dataset is None or measured is not None  # whether the need of other settings is known
    taken, replaced = taken_from_dataloader(given, own, demand)
    others = machine.shm.used or 0
    notes = _notes(demand, measured, data, trial, verdict.need, tries=tries or not here, others_shm=others)
    return replace(
        verdict,
        fix=(*_suggest_legroom_loader(demand, batch, machine, verdict), *verdict.fix),
        settings=largest_settings(demand, batch, machine, fitting=fitting) if known or fitting else None,
        largest_batch=_largest_batch(demand, batch, machine, verdict) if known else None,
        notes=(*verdict.notes, *notes),
        machine=machine,
        findings=_findings(demand, trial),
        from_loader=taken,
        instead_of_loader=replaced,
    )


_COUNTS = {"batch_size": 1, "num_workers": 0, "prefetch_factor": 1}


def _largest_batch(demand: Demand, batch: Batch, machine: Machine, verdict: Plan) -> int | None:
    """The largest batch size; None: no limit, or unknown as the verdict is."""
    if verdict.verdict == "unknown":
        return None
    return largest_batch(demand, batch, machine, fitting=verdict.verdict != "too-big")


def _findings(demand: Demand, trial: LoaderTrial | None) -> tuple[Finding, ...]:
    copied = copied_attributes(trial.copied) if trial is not None else ()
    return (finding_of_dataset(copied, demand.num_workers),) if copied else ()


def _measured_batch(measured: Measured | None, batch_size: int, ranks: int) -> Batch:
    if measured is None:
        return Batch((0,), batch_size, say("not measured: too little free memory"))
    rows = measured.rows_of(ranks)
    drawn = Batch(
        measured.tensors, measured.batch_size, measured.source, rows, measured.making, measured.each,
        measured.other_bytes,
    )  # fmt: skip
    return drawn.of(_samples_in(batch_size, rows))


def _dataset_does_not_fit(machine: Machine, problem: DatasetOutOfMemory) -> Plan:
    """The verdict if not even the dataset and a few of its samples fit."""
    free = next((pool.free for pool in machine.pools if pool.name == problem.pool), None) or 0
    term = Term(problem.pool, max(problem.taken, free + RESERVE), problem.why or str(problem), say("measured"))
    amounts = {"shm": 0, "ram": 0, "pinned": 0, "fds": 0, "disk": 0, problem.pool: term.bytes}
    need = Need((term,), **amounts, at_least=(problem.pool,))
    return replace(fit(need, machine), largest_batch=0, machine=machine)


def _samples_in(batch_size: int, rows: int | None) -> int:
    """Samples in the largest batch of the dataset."""
    return batch_size if not rows else min(batch_size, rows)


def _machine_for_run(host: Host, *, leaving: bool) -> Machine:
    """The machine as the training run will find it: without this process, if that exits before."""
    machine = snapshot(host)
    own = private_bytes() if leaving else None
    ram = machine.pool("ram")
    if not own or ram is None or ram.free is None:
        return machine
    return machine.with_free({"ram": min(ram.free + own, ram.size or ram.free)})


def _one_batch_fits(batch: Batch, machine: Machine) -> bool:
    """Whether one batch fits, so that a trial run is useful; the run itself is guarded.

    The memory of the measuring process is no reason to skip the trial: it can be 40 % more than that of the loop.
    """
    ram = machine.pool("ram")
    return ram is None or ram.free is None or sum(batch.tensors) < ram.free


def _tried(
    opened: FoundDataset,
    collate: Any,
    demand: Demand,
    batch: Batch,
    measured: Measured | None,
    timeout: float,
    *,
    own: Mapping[str, Any] | None,
    known: bool,
    leaving: bool,
) -> LoaderTrial | None:
    """A trial run of the dataset, or of tensors of the given sizes; None if torch is not installed.

    ``own``: the settings of the DataLoader that the dataset is given as, if that is ``known``.
    """
    dataset = opened.dataset
    if find_spec("torch") is None:
        return None
    least = demand.num_workers * (demand.prefetch_factor + 4) + 4  # batches, if the number of samples is unknown
    sizes = [-(-size // batch.samples) for size in batch.tensors]
    samples = min(batch.rows or 1 << 62, batch.samples * least)
    tensors = {"sizes": sizes, "samples": samples} if dataset is None else {}
    settings = {
        "loader_kind": demand.loader_kind, "batch_size": batch.samples, "num_workers": demand.num_workers,
        "prefetch_factor": demand.prefetch_factor, "persistent_workers": demand.persistent_workers,
        "multiprocessing_context": demand.multiprocessing_context, "seconds": min(_TRIAL_S, timeout / 4),
        "batch_seconds": sum(_seconds(measured, batch)), "pause_seconds": timeout / 3, "longer_seconds": timeout / 8,
    }  # fmt: skip
    if dataset is not None and not isinstance(dataset, str):
        return try_object(replace(opened, collate_fn=collate or opened.collate_fn), timeout=timeout, **settings)
    return try_named(
        dataset or "", collate, timeout=timeout, leaving=leaving, measured=measured, own=own, known=known, **settings,
        **tensors,
    )  # fmt: skip


def _seconds(measured: Measured | None, batch: Batch) -> tuple[float, float]:
    """Seconds in which a worker fetches the samples of a batch, and collates them; 0 if unknown."""
    if measured is None:
        return 0.0, 0.0
    return measured.sample_seconds * batch.samples, measured.collate_seconds * batch.samples / measured.batch_size


def _with_tried_process(demand: Demand, trial: LoaderTrial) -> Demand:
    """The demand with the memory of the trial run's process, for settings that were not tried."""
    if demand.process_ram is not None or trial.forked:  # the process that called is running already
        return demand
    return replace(
        demand, process_ram=trial.process, process_ram_source=say("measured: the main process of a trial run")
    )


def _judged_by_trial(
    demand: Demand, batch: Batch, trial: LoaderTrial, machine: Machine, seconds: tuple[float, float]
) -> tuple[Plan, Batch]:
    """The verdict by the memory of a trial run, and the batch with its measured need, for other settings."""
    frozen = tried_need(demand, batch, without_overlap(demand, batch, trial), machine)
    if trial.collection_expected:
        trial = collected(trial)
    taken = tried_need(demand, batch, without_overlap(demand, batch, trial), machine)
    verdict = fit(taken, machine)
    batch = calibrated(demand, batch, taken)
    if verdict.verdict == "too-big":
        if fit(frozen, machine).verdict != "too-big":
            verdict = replace(verdict, fix=(_suggest_freeze(frozen), *verdict.fix))
        return verdict, batch
    if trial.unfinished is not None:
        why = say(
            "{why}; it had allocated {taken} by then, and may need more", why=trial.unfinished,
            taken=format_size(trial.ram),
        )  # fmt: skip
        return _unknown(verdict, "ram", "trial-unfinished", why), batch
    if demand.loader_kind == "legroom" and demand.num_workers and not trial.filled:
        why = say("the trial run's workers were still busy when its pauses ended: a larger timeout is needed")
        return _unknown(verdict, "ram", "trial-unfinished", why), batch
    shm = machine.pool("shm")
    most = taken.shm + overlap(demand, trial)[1] * demand.ranks
    if trial.overlap or (shm is not None and shm.free is not None and most > shm.free):
        why = say(
            "workers restart every epoch, and semaphores of two epochs can overlap: the need is {need} "
            "to {most}, depending on timing. persistent_workers avoids that",
            need=format_size(taken.shm), most=format_size(most),
        )  # fmt: skip
        return _unknown(verdict, "shm", "epoch-overlap", why), batch
    by_chance = tried_need(demand, batch, with_overlap(demand, batch, collected(trial), *seconds), machine)
    longer = fit(by_chance, machine)
    if longer.verdict == "too-big":
        return _unknown_by_chance(verdict, taken, by_chance, longer), batch
    taken, verdict = by_chance, longer
    batch = calibrated(demand, batch, taken)
    more = may_grow(demand, batch, trial, forked=(demand.multiprocessing_context or default_start_method()) == "fork")
    ram = machine.pool("ram")
    if more is None or (ram is not None and ram.free is not None and taken.ram + more > ram.free):
        why = say(
            "memory grew by {grown} over the last {batches} of the trial run and did not level "
            "off: the need of {need} may be too low by {more}",
            grown=format_size(trial.growth), need=format_size(taken.ram),
            more=say("any amount") if more is None else format_size(more),
            batches=counted(trial.growth_batches, phrase("{count} batch"), phrase("{count} batches")),
        )  # fmt: skip
        return _unknown(verdict, "ram", "still-growing", why), batch
    return verdict, batch


def _suggest_freeze(frozen: Need) -> str:
    return say(
        "call gc.freeze() before the DataLoader starts: then its workers do not copy the memory of all Python objects "
        "when they collect garbage, and {need} of RAM are enough",
        need=format_size(frozen.ram),
    )  # fmt: skip


def _unknown_by_chance(verdict: Plan, taken: Need, most: Need, longer: Plan) -> Plan:
    """The verdict where a run fits that has no bad luck, and one that has does not."""
    if any(problem.pool == "shm" for problem in longer.problems):
        why = say(
            "a worker can make a batch before the loop drops the last one: the need is {need} to {most}, depending on "
            "timing",
            need=format_size(taken.shm), most=format_size(most.shm),
        )  # fmt: skip
        return _unknown(verdict, "shm", "batch-overlap", why)
    why = say(
        "a full garbage collection in a worker copies the memory of all Python objects that it inherited, and whether "
        "one runs is chance: the need is {need} without it, and {most} with it. gc.freeze() before the DataLoader "
        "starts avoids the copies",
        need=format_size(taken.ram), most=format_size(most.ram),
    )  # fmt: skip
    return _unknown(verdict, "ram", "garbage-collection", why)


def _unknown(verdict: Plan, pool: str, code: str, why: str) -> Plan:
    return replace(verdict, verdict="unknown", unknown={**verdict.unknown, pool: why}, codes={pool: code})


def _require_dataset_alone(data: object, sample_bytes: object) -> None:
    if data is not None or sample_bytes is not None:
        raise UsageError(
            say("a dataset and the size of its samples cannot be combined"),
            fix=(say("pass one of: a dataset, a data file, the size of a sample"),),
        )


def _measure(
    opened: FoundDataset,
    batch_size: int | None,
    collate_fn: Callable[[Any], Any] | str | None,
    method: str | None,
    timeout: float,
    *,
    here: bool,
) -> tuple[Measured, bool]:
    """The measured dataset, and whether a trial run is possible."""
    dataset = opened.dataset
    if isinstance(dataset, str):
        if collate_fn is not None and not isinstance(collate_fn, str):
            raise UsageError(
                say("the dataset is a name and loaded in a child process: collate_fn must be a name too"),
                fix=(say('pass collate_fn="module:function", or pass the dataset object'),),
            )
        found = measure_dataset(dataset, batch_size=batch_size, collate=collate_fn, timeout=timeout, method=method)
        return found, True
    if isinstance(collate_fn, str):
        raise UsageError(
            say("the dataset is an object: collate_fn must be a function, not a name"),
            fix=(say("pass the function itself"),),
        )
    settings = opened.settings
    method = method or (settings or {}).get("start_method")
    how: dict[str, Any] = {
        "batch_size": chosen_batch_size(batch_size, settings), "collate_fn": collate_fn or opened.collate_fn,
        "method": method, "rows": opened.rows(), "settings": settings,
    }  # fmt: skip
    drawn = measure_object(dataset, timeout=timeout, **how) if here else None
    if drawn is None:  # it raised in the fork: here it raises the same, unless it cannot be forked (as with CUDA)
        return measure(dataset, **how), False
    if (method or default_start_method()) != "fork":  # each worker holds at most what this process holds
        drawn = replace(drawn, idle_worker=private_bytes())
    return drawn, True


def _with_processes(demand: Demand, measured: Measured | None, *, named: bool) -> Demand:
    """The demand with the measured memory of a worker, and of the training process if that is not this one."""
    if measured is None:
        return demand
    sent = measured.transport
    worker = measured.idle_worker if sent is None or sent.worker_ram is None else sent.worker_ram
    if demand.num_workers and worker is not None:
        demand = replace(demand, worker_ram=max(worker, measured.idle_worker or 0))
    if named and demand.process_ram is None and measured.process_ram is not None:
        source = say("measured in the measuring process")
        demand = replace(demand, process_ram=measured.process_ram, process_ram_source=source)
    return demand


def _given_batch(
    data: str | os.PathLike[str] | None,
    keys: str | Iterable[str] | None,
    sample_bytes: int | str | None,
    batch_size: int,
) -> Batch:
    if (data is None) == (sample_bytes is None):
        raise UsageError(
            say("the size of a batch is unknown")
            if data is None
            else say("a data file and the size of a sample cannot be combined"),
            fix=(say("pass one of: a dataset, a data file, the size of a sample"),),
        )
    if sample_bytes is not None:
        return batch_of(parse_size(sample_bytes), batch_size)
    assert data is not None
    rows = data_rows(data, keys)
    return rows.batch(_samples_in(batch_size, rows.rows))


def _require_directory(host: Host, folder: str | os.PathLike[str] | None) -> None:
    """Raise if the directory for checkpoints does not exist."""
    if folder is None or not host.live:
        return
    path = Path(folder) if host.root == Path("/") else host.path(os.fspath(folder))
    if not path.is_dir():
        raise UsageError(
            say("the checkpoint directory {folder} does not exist", folder=os.fspath(folder)),
            why=say("its disk and permissions are unknown"),
            fix=(
                say("create it first:\nmkdir -p {folder}", folder=shlex.quote(os.fspath(folder))),
                say("or pass the directory that will be used"),
            ),
        )


def _with_checkpoints(machine: Machine, host: Host, folder: str | os.PathLike[str] | None) -> Machine:
    """The machine with the disk of the checkpoints as its disk pool."""
    if folder is None:
        return machine
    disk = disk_at(host, "checkpoints", os.path.normpath(os.fspath(folder)))
    source = say("statvfs {path}", path=disk.path)
    pool = Pool("disk", disk.size, disk.used, disk.free, source, disk.reason)
    others = tuple(one for one in machine.disks if one.role != "store")
    return replace(
        machine,
        pools=tuple(pool if one.name == "disk" else one for one in machine.pools),
        disks=(replace(disk, role="store"), *others),
    )


def _suggest_legroom_loader(demand: Demand, batch: Batch, machine: Machine, verdict: Plan) -> tuple[str, ...]:
    """A fix if these settings would fit with legroom.DataLoader, whose batches are not in /dev/shm."""
    if demand.loader_kind == "legroom" or not any(problem.pool == "shm" for problem in verdict.problems):
        return ()
    if not fits(replace(demand, loader_kind="legroom"), batch, machine):
        return ()
    return (say("legroom.DataLoader fits with these settings: its batches are not in /dev/shm"),)


def _notes(
    demand: Demand, measured: Measured | None, data: object, trial: LoaderTrial | None, need: Need, *, tries: bool,
    others_shm: int,
) -> tuple[str, ...]:  # fmt: skip
    notes = []
    if others_shm and trial is not None and demand.num_workers:
        notes.append(
            say(
                "/dev/shm had files of other processes, {used}: what they add or remove during the trial run changes "
                "its figure",
                used=format_size(others_shm),
            )
        )
    if trial is not None and trial.short is not None and {"shm", "ram"} - {*need.at_least}:
        notes.append(
            say("the trial run stopped early: the need is the prediction where that is larger than what it used")
        )
    if trial is None and demand.process_ram is None and not demand.params:
        notes.append(say("RAM of the training process is not included: pass process_ram='4GB'"))
    if trial is None and demand.num_workers and not demand.worker_ram:
        notes.append(say("memory of the worker processes was not measured and is not included"))
    if demand.worker_ram_source:
        notes.append(say("memory of the dataset object is unknown and not included"))
    if trial is None and demand.num_workers:
        notes.append(
            say(
                "predicted without a trial run: torch's workers can need many times as much for samples "
                "of 1 to 32 MB, or if the dataset is a Python list. check --dataset MODULE:OBJECT runs a "
                "trial"
            )
        )
    if not tries:
        notes.append(
            say("no trial run: the dataset raised an error in a fork of this process, but not in the process itself")
        )
    if data is not None:
        notes.append(say("batch sizes are those in the file, before any transform"))
    if measured is not None and measured.unsendable and demand.num_workers:
        notes.append(say("a worker cannot send a batch: {why}", why=measured.unsendable))
    return tuple(notes)
