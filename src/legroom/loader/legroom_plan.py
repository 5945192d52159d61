"""`legroom.plan`: read the machine, running jobs or a data file, and plan."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal

from legroom.advice.fit_on_machine import plan_for
from legroom.advice.job_settings_to_workload import Batch, DataRows, Demand, batch_of, data_rows, workload_of
from legroom.errors import UsageError
from legroom.messages import counted, listed, phrase, say
from legroom.probe.host_files_and_syscalls import Host
from legroom.probe.memory_of_running_jobs import RunningJobs, measure_running_jobs
from legroom.probe.snapshot import snapshot
from legroom.records.machine import Machine
from legroom.records.workload import Plan, Workload
from legroom.system.argument_checks import check_arguments, check_integer
from legroom.units import parse_size

# These have checks of their own: sizes, and what `Demand` checks.
_CHECKED = ("sample_bytes", "per_process", "process_ram", "nccl", "gpu_bytes", "optimizer", "dtype")


def plan(
    *,
    gpus: int | None = None,
    jobs_per_gpu: int = 1,
    ranks: int = 1,
    per_process: int | str | None = None,
    measure: Sequence[int] = (),
    match: str | None = None,
    data: str | os.PathLike[str] | None = None,
    keys: str | Iterable[str] | None = None,
    shared: bool = False,
    sample_bytes: int | str | None = None,
    batch_size: int | None = None,
    num_workers: int = 0,
    prefetch_factor: int = 2,
    persistent_workers: bool = False,
    pin_memory: bool = False,
    loader: Literal["torch", "legroom"] = "torch",
    val_batch: int | None = None,
    val_workers: int | None = None,
    process_ram: int | str | None = None,
    nccl: int | str = 0,
    params: int = 0,
    optimizer: str = "none",
    dtype: str = "float32",
    gpu_bytes: int | str | None = None,
    host: Host | None = None,
) -> Plan:
    """Estimate memory for ``gpus`` × ``jobs_per_gpu`` jobs, and how many of them fit on this machine.

    The memory of one job is given (``per_process``), measured on running jobs (``measure``, ``match``), or predicted
    from its batches (``data`` or ``sample_bytes`` with ``batch_size``, ``num_workers``, ``prefetch_factor``).
    Sizes are bytes or strings such as ``"5.75MB"``.

    Args:
        gpus: Number of GPUs; None counts those of this machine.
        jobs_per_gpu: Jobs on each GPU.
        ranks: Processes per job.
        per_process: ``/dev/shm`` use of each process, without its DataLoaders.
        measure: Process ids of running jobs; each is measured with all its child processes.
        match: A regular expression for the command lines of running jobs, instead of ``measure``.
        data: A data file; its rows are the samples.
        keys: Use only these arrays of the file.
        shared: Include one shared copy of the data in ``/dev/shm``.
        sample_bytes: Size of one sample, instead of ``data``.
        batch_size: Samples per batch.
        num_workers: ``num_workers`` of the DataLoader.
        prefetch_factor: ``prefetch_factor`` of the DataLoader.
        persistent_workers: ``persistent_workers`` of the DataLoader.
        pin_memory: ``pin_memory`` of the DataLoader.
        loader: ``"torch"``, whose batches are in ``/dev/shm``, or ``"legroom"``, whose batches are in RAM.
        val_batch: Batch size of a validation DataLoader that is alive at the same time.
        val_workers: Its ``num_workers``; None: there is no validation DataLoader.
        process_ram: Private memory of one process.
        nccl: NCCL's shared memory in each process.
        params: Number of model parameters kept in host memory.
        optimizer: The optimizer whose state is kept in host memory.
        dtype: Data type of those parameters.
        gpu_bytes: GPU memory of one process.
        host: The machine to read; None is this one.
    """
    check_arguments(plan, locals(), _CHECKED)
    if shared and data is None:
        raise UsageError(
            say("shared=True needs a data file"),
            why=say("it counts one copy of the file in /dev/shm"),
            fix=("data='FILE'", say("or remove shared=True")),
        )
    host = host or Host()
    demand = Demand(
        num_workers=num_workers, prefetch_factor=prefetch_factor, persistent_workers=persistent_workers,
        pin_memory=pin_memory, loader_kind=loader,
        val_batch=val_batch, val_workers=val_workers, ranks=ranks, per_process=_size(per_process),
        process_ram=_size(process_ram), nccl=parse_size(nccl), params=params, optimizer=optimizer, dtype=dtype,
        gpu_bytes=_size(gpu_bytes),
    )  # fmt: skip
    if gpus is not None:
        gpus = check_integer("gpus", gpus, 1)
    jobs_per_gpu = check_integer("jobs_per_gpu", jobs_per_gpu, 1)
    measured = measure_running_jobs(host, measure, match) if measure or match is not None else None
    rows = data_rows(data, keys) if data is not None else None
    batch = _batch(rows, sample_bytes, batch_size)
    _require_something(demand, measured, rows, batch)
    machine = snapshot(host)
    count, how = _gpus(machine, gpus)
    found = plan_for(
        _one(demand, batch, measured, rows if shared else None),
        machine,
        gpus=count,
        jobs_per_gpu=jobs_per_gpu,
        held_shm=measured.held if measured else 0,
        held_ram=sum(amount or 0 for amount in measured.ram) if measured else 0,
    )
    notes = (*how, *_about(measured), *_about_rows(rows, batch), *found.notes)
    return replace(found, notes=notes, measured=measured.jobs if measured else ())


def _size(value: int | str | None) -> int | None:
    return None if value is None else parse_size(value)


def _batch(rows: DataRows | None, sample_bytes: int | str | None, batch_size: int | None) -> Batch | None:
    if rows is not None and sample_bytes is not None:
        raise UsageError(say("a data file and the size of a sample cannot be combined"), fix=(say("pass one of them"),))
    if batch_size is None:
        if sample_bytes is None:
            return None
        raise UsageError(
            say("the size of a sample needs a batch size"), fix=(say("also pass the batch size: batch_size=64"),)
        )
    if rows is not None:
        return rows.batch(batch_size)
    if sample_bytes is not None:
        return batch_of(parse_size(sample_bytes), batch_size)
    raise UsageError(
        say("the size of a sample is unknown, for a batch of {size} samples", size=batch_size),
        fix=(say("pass a data file: data='FILE', or the size of a sample: sample_bytes='600KB'"),),
    )


def _require_something(
    demand: Demand, measured: RunningJobs | None, rows: DataRows | None, batch: Batch | None
) -> None:
    if measured is not None and (demand.per_process is not None or batch is not None):
        raise UsageError(
            say("measuring running jobs cannot be combined with a description of a job"),
            why=say("what they use of /dev/shm already includes their batches"),
            fix=(say("pass one of them: measure=[PID], match='train_.*', per_process='5.75MB' or data='FILE'"),),
        )
    if measured is None and demand.per_process is None and batch is None and rows is None and not demand.params:
        raise UsageError(
            say("the memory of one job is unknown"),
            fix=(
                say("pass it: per_process='5.75MB'"),
                say("or measure running jobs: match='train_.*', or measure=[PID]"),
                say("or predict it: data='FILE', batch_size=64, num_workers=4"),
            ),
        )


def _gpus(machine: Machine, stated: int | None) -> tuple[int, tuple[str, ...]]:
    if stated is not None:
        return stated, ()
    found = len(machine.gpus.cards) or machine.gpus.on_bus or 0
    if found:
        gpus = counted(found, phrase("{count} GPU"), phrase("{count} GPUs"))
        return found, (say("{gpus} on this machine ({source})", gpus=gpus, source=machine.gpus.source),)
    why = machine.gpus.reason or machine.gpus.source
    return 1, (say("no GPU found ({why}): one is assumed; for another number pass gpus=8", why=why),)


def _one(demand: Demand, batch: Batch | None, measured: RunningJobs | None, shared: DataRows | None) -> Workload:
    """One job: its processes are its ranks."""
    one = workload_of(demand, batch, demand.ranks)
    if measured is not None:
        source = say("measured on running jobs: {count}", count=len(measured.jobs))
        one = replace(
            one,
            process_shm=measured.each_shm,
            process_shm_source=source,
            process_ram=measured.each_ram or 0 if demand.process_ram is None else demand.process_ram,
            process_ram_source=source if demand.process_ram is None else one.process_ram_source,
            entries_shm=measured.shared,
            entries_shm_source=source if measured.shared else "",
        )
    if shared is not None:
        sources = [one.entries_shm_source] if one.entries_shm_source else []
        one = replace(
            one,
            entries_shm=one.entries_shm + shared.nbytes,
            entries_shm_source=listed([*sources, say("read from the data file")]),
            mapped=shared.nbytes,
        )
    return one


def _about(measured: RunningJobs | None) -> tuple[str, ...]:
    if measured is None:
        return ()
    return tuple(note for job in measured.jobs for note in job.notes)


def _about_rows(rows: DataRows | None, batch: Batch | None) -> tuple[str, ...]:
    if rows is None or batch is None:
        return ()
    notes = [
        say("batch sizes are those in the file: converting uint8 to float32 in a transform takes four times as much")
    ]
    if rows.uneven:
        notes.append(say("rows differ in length and only their average is known, so a batch may be larger"))
    if rows.left_out:
        notes.append(say("not included, because they have no rows: {names}", names=listed(rows.left_out[:5])))
    return tuple(notes)
