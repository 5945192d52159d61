"""`legroom.check`: whether this training survives on this box, before it starts.

Covers: drawing a batch from a dataset where one is given, the disk that checkpoints go to, the verdict with the
largest settings that fit. Does not cover: the arithmetic (budget), drawing itself (measure.py, apart.py).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from legroom.budget.demand import Batch, Demand, batch_of
from legroom.budget.largest import fits, judged, largest_batch, largest_settings
from legroom.budget.rows import data_rows
from legroom.errors import UsageError
from legroom.loader.bare_demand import with_bare_processes
from legroom.loader.measure.private import give_back
from legroom.model import Box, Measured, Plan, Pool
from legroom.probe.box import snapshot
from legroom.probe.disk import disk_at
from legroom.probe.host import Host
from legroom.units import parse_size
from legroom.words import say

_TIMEOUT = 120.0


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
    timeout: float = _TIMEOUT,
    host: Host | None = None,
) -> Plan:
    """Whether a training with these settings fits this box now; ``verdict`` is fits, too-big or unknown.

    The bytes of a batch come from ``dataset`` (an object, drawn from here, or ``"module:object"``, drawn from in a
    child process), from a ``data`` file's description, or from ``sample_bytes``. Sizes are bytes or texts.

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
        timeout: Seconds for drawing in a child process.
        host: Where to read; None is this machine.
    """
    host = host or Host()
    checkpoint = parse_size(checkpoint_bytes)
    if checkpoint and checkpoint_dir is None:
        raise UsageError(
            say("checkpoints of {size} bytes, and no place for them", size=checkpoint),
            fix=(say("give the directory they go to"),),
        )
    demand = Demand(
        workers=num_workers, prefetch=prefetch_factor, persistent=persistent_workers, pin_memory=pin_memory,
        kind=loader, val_batch=val_batch,
        val_workers=val_workers, ranks=ranks, per_process=None if per_process is None else parse_size(per_process),
        process_ram=None if process_ram is None else parse_size(process_ram), params=params,
        optimizer=optimizer, dtype=dtype, checkpoint=checkpoint,
    )  # fmt: skip
    measured = None
    if dataset is not None:
        _only(data, sample_bytes)
        measured = _drawn(dataset, batch_size, collate_fn, demand, timeout)
        give_back()  # what was drawn is not needed any more, and must not be in the figures
        demand = _with_processes(demand, measured, named=isinstance(dataset, str))
        batch = Batch(measured.tensors, batch_size, measured.source, measured.rows, measured.making)
    else:
        batch = _stated(data, keys, sample_bytes, batch_size)
        if demand.workers and host.live and host.root == Path("/"):  # elsewhere other processes would run
            demand = with_bare_processes(demand, timeout)
    box = _with_checkpoints(snapshot(host), host, checkpoint_dir)
    verdict = judged(demand, batch, box)
    return replace(
        verdict,
        fix=(*_another_way(demand, batch, box, verdict), *verdict.fix),
        settings=largest_settings(demand, batch, box),
        largest_batch=largest_batch(demand, batch, box),
        notes=(*verdict.notes, *_notes(demand, measured, data)),
        box=box,
    )


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
) -> Measured:
    if isinstance(dataset, str):
        from legroom.loader.measure.apart import measure_dataset

        if collate_fn is not None and not isinstance(collate_fn, str):
            raise UsageError(
                say("the dataset is named and drawn from in a child: its collate function must be named too"),
                fix=(say('collate_fn="module:function", or give the dataset itself'),),
            )
        return measure_dataset(
            dataset,
            batch_size=batch_size,
            collate=collate_fn,
            timeout=timeout,
            transport=demand.kind if demand.workers else None,
        )
    from legroom.loader.measure.measuring import measure

    if isinstance(collate_fn, str):
        raise UsageError(
            say("the dataset is an object: its collate function must be an object too, not a name"),
            fix=(say("give the function itself"),),
        )
    return measure(dataset, batch_size=batch_size, collate_fn=collate_fn)


def _with_processes(demand: Demand, measured: Measured, *, named: bool) -> Demand:
    """The demand with what was measured of the processes: each worker, and the training where it is not this one."""
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
    return data_rows(data, keys).batch(batch_size)


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


def _notes(demand: Demand, measured: Measured | None, data: object) -> tuple[str, ...]:
    notes = []
    if demand.process_ram is None and not demand.params:
        notes.append(say("RAM of the training process itself was not stated: it is not counted"))
    if demand.workers and not demand.worker_ram:
        notes.append(say("the memory of a worker itself was not measured: it is not counted"))
    if demand.worker_ram_source:
        notes.append(say("what the dataset itself holds in memory is not known: it is not counted"))
    if data is not None:
        notes.append(say("batches are counted as the rows lie in the file, before any transform"))
    if measured is not None and measured.unsendable and demand.workers:
        notes.append(say("a batch cannot come from a worker: {why}", why=measured.unsendable))
    return tuple(notes)
