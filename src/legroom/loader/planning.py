"""`legroom.plan`: read the machine, running jobs or a data file, and plan."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from legroom.advice.plan import plan_for
from legroom.advice.plan_inputs import Batch, DataRows, Demand, batch_of, data_rows, workload_of
from legroom.errors import NoSuchProcess, UsageError
from legroom.probe.host import Host
from legroom.probe.job import job, jobs
from legroom.probe.shm_segments import Segments, files_below
from legroom.probe.snapshot import snapshot
from legroom.records import Box, Job, Plan, Workload
from legroom.system.argument_checks import check_integer
from legroom.units import parse_size
from legroom.words import counted, joined, listed, phrase, say


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
    """How big a box ``gpus`` × ``jobs_per_gpu`` trainings need, and how many fit this one.

    What one takes is stated (``per_process``), measured from running ones (``measure``, ``match``), or predicted
    from its batches (``data`` or ``sample_bytes`` with ``batch_size``, ``num_workers``, ``prefetch_factor``).
    Sizes are bytes or texts such as ``"5.75MB"``.

    Args:
        gpus: Cards; None counts those of this box.
        jobs_per_gpu: Trainings on each card.
        ranks: Processes of one training.
        per_process: What each process holds of ``/dev/shm`` besides its loaders.
        measure: Process ids of running trainings, each measured with all its children.
        match: Or a pattern of their command lines.
        data: A data file whose rows make the batches.
        keys: Only these arrays of it.
        shared: Count one shared copy of the data in ``/dev/shm``.
        sample_bytes: Bytes of one sample, where there is no file.
        batch_size: Samples a batch.
        num_workers: Of the training's loader.
        prefetch_factor: Batches that each worker keeps ready.
        persistent_workers: Whether its workers live on from epoch to epoch.
        pin_memory: Whether it pins its batches.
        loader: Whose DataLoader: ours takes RAM where torch's takes ``/dev/shm``.
        val_batch: Samples a batch of a validation loader that is alive beside it.
        val_workers: That loader's workers; None: there is none.
        process_ram: Private memory of one process.
        nccl: NCCL's segments in each process.
        params: Parameters of a model that is kept on the host.
        optimizer: Whose state is kept there too.
        dtype: Of those parameters.
        gpu_bytes: Memory of one process on its card.
        host: Where to read; None is this machine.
    """
    host = host or Host()
    demand = Demand(
        workers=num_workers, prefetch=prefetch_factor, persistent=persistent_workers, pin_memory=pin_memory,
        kind=loader,
        val_batch=val_batch, val_workers=val_workers, ranks=ranks, per_process=_size(per_process),
        process_ram=_size(process_ram), nccl=_size(nccl) or 0, params=params, optimizer=optimizer, dtype=dtype,
        gpu=_size(gpu_bytes),
    )  # fmt: skip
    if gpus is not None:
        gpus = check_integer("gpus", gpus, 1)
    jobs_per_gpu = check_integer("jobs_per_gpu", jobs_per_gpu, 1)
    measured = running(host, measure, match) if measure or match is not None else None
    rows = data_rows(data, keys) if data is not None else None
    batch = _batch(rows, sample_bytes, batch_size)
    _require_something(demand, measured, rows, batch)
    box = snapshot(host)
    count, how = _gpus(box, gpus)
    found = plan_for(
        _one(demand, batch, measured, rows if shared else None),
        box,
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
        raise UsageError(
            say("a data file and the bytes of a sample say the same thing twice"),
            fix=(say("give one of them"),),
        )
    if batch_size is None:
        if sample_bytes is None:
            return None
        raise UsageError(
            say("the bytes of a sample alone make no batch"), fix=(say("give the batch size as well"),)
        )
    if rows is not None:
        return rows.batch(batch_size)
    if sample_bytes is not None:
        return batch_of(parse_size(sample_bytes), batch_size)
    raise UsageError(
        say("a batch of {size} samples of unknown bytes", size=batch_size),
        fix=(say("give a data file, or the bytes of a sample"),),
    )


def _require_something(
    demand: Demand, measured: Running | None, rows: DataRows | None, batch: Batch | None
) -> None:
    if measured is not None and (demand.per_process is not None or batch is not None):
        raise UsageError(
            say("running trainings were measured, and what one takes was given as well"),
            why=say("what they hold in /dev/shm has their batches in it already"),
            fix=(say("measure, or state, or predict: one of them"),),
        )
    if (
        measured is None
        and demand.per_process is None
        and batch is None
        and rows is None
        and not demand.params
    ):
        raise UsageError(
            say("nothing is known of what one training takes"),
            fix=(
                say("state it: --per-process 5.75MB"),
                say("measure running ones: --match 'train_.*', or --measure PID"),
                say("or predict it: --data FILE --batch 64 --workers 4"),
            ),
        )


def _gpus(box: Box, stated: int | None) -> tuple[int, tuple[str, ...]]:
    if stated is not None:
        return stated, ()
    found = len(box.gpus.cards) or box.gpus.on_bus or 0
    if found:
        gpus = counted(found, phrase("{count} GPU"), phrase("{count} GPUs"))
        return found, (say("counted here: {gpus} ({source})", gpus=gpus, source=box.gpus.source),)
    why = box.gpus.reason or box.gpus.source
    return 1, (say("no GPU was seen ({why}): counted as one, give --gpus for another number", why=why),)


def _one(demand: Demand, batch: Batch | None, measured: Running | None, shared: DataRows | None) -> Workload:
    """One job: its processes are its ranks."""
    one = workload_of(demand, batch, demand.ranks)
    if measured is not None:
        source = say("measured on {count} running", count=len(measured.jobs))
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
            entries_shm_source=listed([*sources, say("the data's description")]),
            mapped=shared.nbytes,
        )
    return one


def _about(measured: Running | None) -> tuple[str, ...]:
    if measured is None:
        return ()
    return tuple(note for job in measured.jobs for note in job.notes)


def _about_rows(rows: DataRows | None, batch: Batch | None) -> tuple[str, ...]:
    if rows is None or batch is None:
        return ()
    notes = [
        say(
            "batches are counted as the rows lie in the file: a transform that makes float32 of uint8 takes four "
            "times as much"
        )
    ]
    if rows.uneven:
        notes.append(say("rows differ in length and only their average is known: a batch may be larger"))
    if rows.left_out:
        notes.append(say("not part of a batch, having no rows: {names}", names=listed(rows.left_out[:5])))
    return tuple(notes)


_STORE = "/legroom-"  # a store of shared datasets: one copy for any number of trainings


@dataclass(frozen=True, slots=True)
class Running:
    """Trainings that run now: each one's own share, and what they hold together."""

    jobs: tuple[Job, ...]
    shm: tuple[int, ...]  # bytes in /dev/shm that are one training's own
    ram: tuple[int | None, ...]  # private memory of each, workers included
    shared: int  # bytes in /dev/shm that several of them use, or may use
    rss_shmem: tuple[int | None, ...]

    @property
    def held(self) -> int:
        """All they hold of /dev/shm."""
        return sum(self.shm) + self.shared

    @property
    def each_shm(self) -> int:
        """The mean of one, rounded up."""
        return -(-sum(self.shm) // len(self.shm))

    @property
    def each_ram(self) -> int | None:
        """The mean private memory of one; None where one's could not be read."""
        known = [amount for amount in self.ram if amount is not None]
        return -(-sum(known) // len(known)) if len(known) == len(self.ram) else None

    @property
    def each_rss_shmem(self) -> int | None:
        """What RssShmem would have told of one."""
        known = [amount for amount in self.rss_shmem if amount is not None]
        return -(-sum(known) // len(known)) if len(known) == len(self.rss_shmem) else None


def running(host: Host, pids: Sequence[int] = (), pattern: str | None = None) -> Running:
    """The trainings with those process ids, and those whose command line the pattern finds."""
    found = {one.pid: one for one in (jobs(host, pattern) if pattern is not None else [])}
    found.update({pid: job(host, pid) for pid in pids})
    members = tuple(found.values())
    for one in members:
        if one.held.get("shm") is None:
            raise NoSuchProcess(
                say("process {pid} cannot be measured", pid=one.pid),
                why=joined(one.notes) or say("its maps may not be read"),
                fix=(
                    say("run as the user who started it, or as root"),
                    say("or state what one process takes: --per-process 5.75MB"),
                ),
            )
    segments, everybodys = _shared(host, members)
    own = []
    for one in members:
        inodes = {inode for process in one.processes for inode in segments.seen.get(process.pid, ())}
        own.append(max(0, (one.held["shm"] or 0) - (segments.total(inodes & everybodys) or 0)))
    used = {inode for inodes in segments.seen.values() for inode in inodes}
    return Running(
        jobs=members,
        shm=tuple(own),
        ram=tuple(_private(host, one) for one in members),
        shared=segments.total(everybodys & used) or 0,
        rss_shmem=tuple(_sum([process.rss_shmem for process in one.processes]) for one in members),
    )


def _shared(host: Host, members: Sequence[Job]) -> tuple[Segments, set[int]]:
    """Segments that more than one training holds, and those of a dataset store, which any may hold."""
    segments = Segments.of(host)
    listed = files_below(host, segments.path).files
    segments.know(listed)
    holders: Counter[int] = Counter()
    for one in members:
        inodes: set[int] = set()
        for process in one.processes:
            held = segments.of_process(process.pid)
            inodes |= held.inodes if held is not None else set()
        holders.update(inodes)
    stored = {file.inode for file in listed if file.path.startswith(segments.path + _STORE)}
    return segments, stored | {inode for inode, count in holders.items() if count > 1}


def _private(host: Host, one: Job) -> int | None:
    """Anonymous pages by PSS, and pinned memory; /dev/shm is counted for itself.

    Pages of files (libraries, a dataset on disk that is mapped) are one copy for all who map them, and the kernel takes
    them back when it needs to: a second training brings no more of them.
    """
    total = 0
    for process in one.processes:
        anonymous = host.table(f"/proc/{process.pid}/smaps_rollup").get("Pss_Anon")
        if anonymous is None:  # kernels before 5.9: by status, where a forked child's share counts twice
            anonymous = host.table(f"/proc/{process.pid}/status").get("RssAnon")
        if anonymous is None:
            return None
        total += anonymous + (process.pinned or 0)
    return total


def _sum(amounts: Sequence[int | None]) -> int | None:
    known = [amount for amount in amounts if amount is not None]
    return sum(known) if len(known) == len(amounts) else None
