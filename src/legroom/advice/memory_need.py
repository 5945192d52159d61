"""What a workload needs of each memory pool: predicted before it runs, or measured in a trial run.

Counts batches in flight of torch's DataLoader and of Legroom's, semaphores, pinned memory, workers and their growth,
models and optimizer state on the host. While a worker assembles a batch, its samples, the collated batch and the
shared memory for sending it exist at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from legroom.advice.job_settings_to_workload import Batch, Demand, loaders_of, workload_of
from legroom.messages import WORKERS, counted, phrase, say
from legroom.records.machine import Machine
from legroom.records.workload import LoaderTrial, Need, PlannedLoader, Term, Workload
from legroom.units import format_size

PAGE = 4096
TENSOR_HEADER = 64  # before each tensor with the file_system strategy; counting it always costs at most a page
_QUEUE, _EVENT = 3, 5  # semaphores of a multiprocessing.Queue and of an Event
_PAGE_TABLES = 512  # one entry of 8 bytes for each page of 4096
_WORKER_FDS = 6  # both ends of its index queue, its sentinel, the sockets that send tensors
_OWN_FDS = 32  # the interpreter, its libraries, standard streams, a log and a data file


def batch_pages(tensors: Iterable[int]) -> int:
    """Bytes that one batch takes in /dev/shm: whole pages for each tensor and its header."""
    return sum(-(-(nbytes + TENSOR_HEADER) // PAGE) * PAGE for nbytes in tensors)


def batches_in_flight(workers: int, prefetch: int, *, again: bool = False) -> int:
    """How many batches torch's DataLoader may keep in /dev/shm at once.

    ``again``: workers restart every epoch. When they are forked, the loop variable still refers to the last batch of
    the previous epoch; they inherit its mapping and keep it alive until their own epoch ends.
    """
    return workers * prefetch + 2 + again if workers else 0


def semaphores(workers: int) -> int:
    """Semaphores of one DataLoader: a queue per worker, one for the results, an event; each takes a page.

    Counted twice, because those of two epochs can overlap.
    """
    return 2 * (_QUEUE * (workers + 1) + _EVENT) if workers else 0


def flights(loader: PlannedLoader) -> int:
    """Batches that torch's DataLoader may keep at once, including the consumer's two.

    While the next batch is fetched, the loop variable still refers to the last one, also across epochs: the last batch
    of one epoch is alive when the first of the next arrive. Hence one more than an epoch's batches.
    """
    most = batches_in_flight(loader.num_workers, loader.prefetch_factor, again=not loader.persistent_workers)
    return _within_epoch(loader, most)


def _own_flights(loader: PlannedLoader) -> int:
    """The same without the batch that only workers still map: it needs no descriptor and is not pinned."""
    return _within_epoch(loader, batches_in_flight(loader.num_workers, loader.prefetch_factor))


def _within_epoch(loader: PlannedLoader, most: int) -> int:
    return most if loader.batches is None else min(most, loader.batches + 1)


def pinned_size(nbytes: int) -> int:
    """Bytes that pinning takes: torch's host allocator rounds up to powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def need(workload: Workload) -> Need:
    """What the workload needs of each pool, term by term."""
    shm = [*_shm(workload)]
    pinned = [*_pinned(workload)]
    ram = [*_ram(workload), *_charged(shm, pinned)]
    disk = [*_disk(workload)]
    fds = [*_fds(workload)]
    gpu = [*_gpu(workload)]
    return Need(
        terms=tuple(term for term in (*shm, *ram, *pinned, *fds, *disk, *gpu) if term.bytes),
        shm=_sum(shm),
        ram=_sum(ram),
        pinned=_sum(pinned),
        fds=_sum(fds),
        disk=_sum(disk),
        gpu=None if workload.gpu is None else _sum(gpu),
    )


def _sum(terms: Iterable[Term]) -> int:
    return sum(term.bytes for term in terms)


def _term(pool: str, each: int, count: int, what: str, source: str) -> Term:
    """The same bytes for each of ``count``."""
    return Term(pool, each * count, what if count == 1 else f"{what} × {count}", source)


def _shm(workload: Workload) -> Iterator[Term]:
    count, own = workload.processes, workload.process_shm
    yield _term("shm", own, count, say("{each} per process", each=format_size(own)), workload.process_shm_source)
    for loader in workload.loaders:
        if not loader.num_workers:
            continue
        locks = semaphores(loader.num_workers)
        what = say("{locks} semaphores of the DataLoader's queues", locks=locks)
        yield _term("shm", locks * PAGE, count, what, say("one page each"))
        if loader.loader_kind == "legroom":
            continue
        batch = batch_pages(loader.tensors)
        what = say(
            "{flights} batches of {batch} in flight ({why})",
            flights=flights(loader), batch=format_size(batch), why=_flights_text(loader),
        )  # fmt: skip
        yield _term("shm", batch * flights(loader), count, what, loader.source)
    what = say("NCCL, {each} per process", each=format_size(workload.nccl))
    yield _term("shm", workload.nccl, count, what, say("given by you"))
    source = workload.entries_shm_source or say("read from the data file")
    yield Term("shm", workload.entries_shm, say("shared datasets, one copy"), source)


def _ram(workload: Workload) -> Iterator[Term]:
    count, own, model = workload.processes, workload.process_ram, workload.host_model
    yield _term("ram", own, count, say("{each} per process", each=format_size(own)), workload.process_ram_source)
    what = say("model and optimizer on the host, {each}", each=format_size(model))
    yield _term("ram", model, count, what, workload.host_model_source)
    for loader in workload.loaders:
        yield from _loader_ram(workload, loader)
    tables = -(-workload.mapped // _PAGE_TABLES)
    readers = count * (1 + sum(loader.num_workers for loader in workload.loaders))
    what = say("page tables, {each} for {mapped} mapped", each=format_size(tables), mapped=format_size(workload.mapped))
    yield _term("ram", tables, readers, what, say("8 bytes per page"))


def _loader_ram(workload: Workload, loader: PlannedLoader) -> Iterator[Term]:
    count, own, batch = workload.processes, workload.worker_ram, loader.batch_bytes
    what = say("{workers} of {each}", workers=counted(loader.num_workers, *WORKERS), each=format_size(own))
    source = workload.worker_ram_source or say("private to each worker")
    yield _term("ram", own * loader.num_workers, count, what, source)
    makers = max(1, loader.num_workers)
    what = say("a batch being assembled, {each} × {makers}", each=format_size(loader.made_of), makers=makers)
    yield _term("ram", loader.made_of * makers, count, what, loader.source)
    if not loader.num_workers:
        what = say("2 batches of {batch} in the training process", batch=format_size(batch))
        yield _term("ram", 2 * batch, count, what, loader.source)
    elif loader.loader_kind == "legroom":
        yield from _arena(loader, own, count)


def _arena(loader: PlannedLoader, own: int, count: int) -> Iterator[Term]:
    """The batches of legroom.DataLoader, and the headroom it requires before it starts workers."""
    batch, slots = batch_pages(loader.tensors), loader.slots
    if slots is None:
        slots = loader.num_workers * (2 + loader.prefetch_factor)
        what = say(
            "arena of {slots} batches of {batch} ({workers} × (2 + {prefetch}))",
            slots=slots, batch=format_size(batch), workers=counted(loader.num_workers, *WORKERS),
            prefetch=loader.prefetch_factor,
        )  # fmt: skip
    else:
        what = say(
            "arena of {slots} batches of {batch}, one per worker and the one in use",
            slots=slots, batch=format_size(batch),
        )  # fmt: skip
    yield _term("ram", slots * batch, count, what, loader.source)
    free = spare(least(Each(own, loader.made_of, batch), loader.num_workers))
    what = say("{free} headroom beside the workers", free=format_size(free))
    yield _term("ram", free, count, what, say("one eighth plus 16 MB"))


def _pinned(workload: Workload) -> Iterator[Term]:
    for loader in workload.loaders:
        if not loader.pin_memory:
            continue
        batch = sum(pinned_size(nbytes) for nbytes in loader.tensors)
        # The pinning thread empties the workers' queue, so all batches in flight may be pinned.
        held = _own_flights(loader) if loader.num_workers else 2
        what = say("{held} pinned batches of {batch}, rounded up to powers of two", held=held, batch=format_size(batch))
        yield _term("pinned", batch * held, workload.processes, what, loader.source)


def _charged(shm: Iterable[Term], pinned: Iterable[Term]) -> Iterator[Term]:
    """Shared and pinned memory count as RAM in the cgroup."""
    yield Term("ram", _sum(shm), say("/dev/shm is backed by RAM"), say("the sum of the shm terms"))
    yield Term("ram", _sum(pinned), say("pinned memory is RAM"), say("the sum of the pinned terms"))


def _disk(workload: Workload) -> Iterator[Term]:
    what = say("checkpoints, {each} per process", each=format_size(workload.checkpoint))
    yield _term("disk", workload.checkpoint, workload.processes, what, say("given by you"))


def _fds(workload: Workload) -> Iterator[Term]:
    """Descriptors of one training process: one for every tensor in flight."""
    if not workload.loaders:
        return
    yield Term("fds", _OWN_FDS, say("the process itself"), say("estimate"))
    for loader in workload.loaders:
        if not loader.num_workers:
            continue
        text = say("queues and sockets of {workers}", workers=counted(loader.num_workers, *WORKERS))
        yield Term("fds", _WORKER_FDS * (loader.num_workers + 1), text, say("six per worker, six for results"))
        if loader.loader_kind == "torch":
            text = say("one file descriptor per tensor of {flights} batches", flights=_own_flights(loader))
            yield Term("fds", _own_flights(loader) * len(loader.tensors), text, loader.source)


def _gpu(workload: Workload) -> Iterator[Term]:
    if workload.gpu is not None:
        text = say("{each} per process, {count} per GPU", each=format_size(workload.gpu), count=workload.per_gpu)
        yield Term("gpu", workload.gpu * workload.per_gpu, text, say("given by you"))


def _flights_text(loader: PlannedLoader) -> str:
    most = batches_in_flight(loader.num_workers, loader.prefetch_factor, again=not loader.persistent_workers)
    if flights(loader) < most:
        return say("{batches} per epoch + 1", batches=loader.batches)
    beyond = 2 if loader.persistent_workers else 3
    return f"{counted(loader.num_workers, *WORKERS)} × {loader.prefetch_factor} + {beyond}"


SPARE = 16 << 20  # page tables, stacks, pipe buffers: counted by the cgroup, and not predictable


@dataclass(frozen=True, slots=True)
class Each:
    """Bytes that one worker needs."""

    own: int  # the process, before its first sample
    making: int  # additional private memory at the peak, while a batch is assembled
    batch: int  # in the slot

    @property
    def all(self) -> int:
        """Until its first batch is sent."""
        return self.own + self.making + self.batch


def least(each: Each, workers: int) -> int:
    """What these workers need, each with one batch, plus the batch in use."""
    return workers * each.all + each.batch


def spare(need: int) -> int:
    """Headroom above a need: samples differ in size, and allocators keep freed memory."""
    return SPARE + need // 8


def fits(need: int, free: int) -> bool:
    """Whether a need fits with its headroom."""
    return need + spare(need) <= free


def most_workers(each: Each, free: int, asked: int) -> int:
    """How many workers fit, up to the requested number; 0 if none does."""
    return next((count for count in range(asked, 0, -1) if fits(least(each, count), free)), 0)


def most_samples(each: Each, free: int, workers: int, samples: int) -> int:
    """The largest batch size below ``samples`` (the measured one) that fits with these workers; 0 if none does."""

    def too_many(count: int) -> bool:
        smaller = Each(each.own, -(-each.making * count // samples), -(-each.batch * count // samples))
        return not fits(least(smaller, workers), free)

    return bisect_left(range(1, samples), True, key=too_many)


_MARGIN, _MARGIN_BYTES = 64, 1 << 20  # a share and bytes: no two runs use exactly the same
_PICKLED = 16  # at most this share of it for a pickled batch on its way
_SLICE_S = 0.1  # for which the training process may have to wait for a core between two lines of Python
_STOPPED = ("ram", "shm", "fds")  # pools that can stop a trial
_SHORT = 2 << 20  # at least this much more is needed if a trial was stopped


def tried_need(demand: Demand, batch: Batch, trial: LoaderTrial, machine: Machine) -> Need:
    """The measured need for all ranks, plus what the trial did not run: model, validation loader, checkpoints.

    A trial that ran out of a pool has measured only what it got. Its need is then at least the predicted one.
    """
    count = demand.ranks
    whole = workload_of(demand, batch, count, count)
    stated = 0 if demand.process_ram_source else demand.process_ram or 0
    rest = need(
        replace(
            whole, loaders=whole.loaders[1:], process_ram=max(0, stated - trial.process), worker_ram=demand.worker_ram
        )
    )
    pinned = [term for term in need(replace(whole, loaders=whole.loaders[:1])).terms if term.pool == "pinned"]
    pinned_bytes = sum(term.bytes for term in pinned)
    terms = _measured_terms(demand, batch, trial, machine)
    at_least: list[str] = []
    if trial.short is not None:
        reached = _filled(demand, batch, trial)
        terms, at_least = _not_below(terms, _predicted(demand, batch, trial), reached, count)
        if not sum(batch.tensors):  # the size of a batch is not known
            at_least = [*_STOPPED]
    if pinned_bytes:
        terms.append(Term("ram", pinned_bytes, say("pinned memory is RAM"), say("the sum of the pinned terms")))
    return Need(
        terms=tuple(term for term in (*terms, *pinned, *rest.terms) if term.bytes),
        shm=_sum_of(terms, "shm") + rest.shm,
        ram=_sum_of(terms, "ram") + rest.ram,
        pinned=pinned_bytes + rest.pinned,
        fds=_sum_of(terms, "fds") + rest.fds,
        disk=rest.disk,
        gpu=rest.gpu,
        at_least=tuple(at_least),
    )


def _measured_terms(demand: Demand, batch: Batch, trial: LoaderTrial, machine: Machine) -> list[Term]:
    """What the trial used of each pool; of one that ran out, more than there is."""
    count, source = demand.ranks, _source(trial)
    trial = _filled(demand, batch, trial)
    ram = (trial.ram + trial.ram // _MARGIN + _MARGIN_BYTES + _on_its_way(demand, batch, trial)) * count
    what = _text(demand, trial)
    if trial.short == "ram":
        ram = max(ram, (free_amount(machine, "ram") or 0) + _SHORT)
        what = say("stopped at {taken}: needs more than that", taken=format_size(trial.ram))
    terms = [Term("ram", ram, what, source)]
    shm, what = (trial.shm - overlap(demand, trial)[0]) * count, say("batches and semaphores at their peak")
    if trial.short == "shm":
        # How much of the tensor that was refused is in there already is not known.
        shm = max(shm, (free_amount(machine, "shm") or 0) + PAGE)
        what = say("stopped at {taken}: needs more than that", taken=format_size(trial.shm))
    terms.append(Term("shm", shm, what, source))
    fds, what = trial.fds, say("open files of the main process")
    if trial.short == "fds":  # workers also use a descriptor for each tensor they have not sent yet
        fds, what = (max(fds, (free_amount(machine, "fds") or 0) + 1), say("open files of one of its processes"))
    terms.append(Term("fds", fds, what, source))
    return terms


def _predicted(demand: Demand, batch: Batch, trial: LoaderTrial) -> tuple[Term, ...]:
    """The predicted terms of the loop that was tried; none where a stopped trial has measured more.

    Outside /dev/shm, full queues were measured if they were seen full. A stream may be too short to fill them.
    """
    long_enough = batch.endless or _batches(demand, batch, trial) is not None
    if trial.short != "shm" and (trial.filled or not long_enough):
        return ()
    least = replace(demand, squeezed=demand.loader_kind == "legroom", pin_memory=False)
    whole = workload_of(least, batch, demand.ranks)
    loop = Workload(
        processes=demand.ranks, loaders=whole.loaders[:1], worker_ram=whole.worker_ram,
        worker_ram_source=whole.worker_ram_source, process_ram=0 if trial.forked else trial.process,
        process_ram_source=say("measured: the main process of a trial run"),
    )  # fmt: skip
    return need(loop).terms


def _not_below(
    measured: Sequence[Term], predicted: Sequence[Term], trial: LoaderTrial, ranks: int
) -> tuple[list[Term], list[str]]:
    """For each pool the larger of both, and the pools of which only a lower bound is known."""
    terms: list[Term] = []
    at_least: list[str] = []
    # A trial that ran out of RAM is known to need more than there is, by an unknown amount: nothing is added to that.
    missing = max(0, _sum_of(predicted, "shm") - trial.shm * ranks) if trial.short == "shm" else 0
    for term in measured:
        whole, reached = [one for one in predicted if one.pool == term.pool], [term]
        if term.pool == "ram" and missing:
            unreached = say("batches in /dev/shm that the trial run did not reach")
            reached.append(Term("ram", missing, unreached, say("predicted")))
        larger = _sum(whole) > _sum(reached)
        terms += whole if larger else reached
        if not larger and len(reached) == 1:
            at_least.append(term.pool)
    return terms, at_least


def _sum_of(terms: Iterable[Term], pool: str) -> int:
    return _sum(term for term in terms if term.pool == pool)


def _on_its_way(demand: Demand, batch: Batch, trial: LoaderTrial) -> int:
    """A pickled batch that a worker sends while the process loads another: whether they coincide is timing."""
    return min(batch.pickled, trial.ram // _PICKLED) if demand.num_workers else 0


def without_overlap(demand: Demand, batch: Batch, trial: LoaderTrial) -> LoaderTrial:
    """The trial without a batch of torch's that a worker made before the loop had dropped the last one: chance."""
    if not _overlaps(demand, trial) or not trial.waiting_shm:
        return trial
    one = batch_pages(loaders_of(demand, batch)[0].tensors)
    return replace(trial, shm=max(trial.waiting_shm, trial.shm - one))


def with_overlap(
    demand: Demand, batch: Batch, trial: LoaderTrial, fetch_seconds: float, collate_seconds: float
) -> LoaderTrial:
    """The trial with as much of that batch as a worker can make while the training process waits for a core.

    A worker first fetches the samples. It allocates in /dev/shm when it collates them. A short epoch has no such batch:
    all of its batches are requested at the start.
    """
    batches = _batches(demand, batch, trial)
    if not _overlaps(demand, trial) or (batches or 1 << 62) <= demand.num_workers * demand.prefetch_factor:
        return trial
    one, left = batch_pages(loaders_of(demand, batch)[0].tensors), _SLICE_S - fetch_seconds
    if left <= 0:
        return trial
    made = one if collate_seconds <= left else int(one * left / collate_seconds)
    waiting = trial.waiting_shm or _full_queues(demand, batch, trial)
    return replace(trial, shm=max(trial.shm, waiting + made))


def _overlaps(demand: Demand, trial: LoaderTrial) -> bool:
    return demand.loader_kind == "torch" and demand.num_workers > 0 and trial.short is None


def collected(trial: LoaderTrial) -> LoaderTrial:
    """The trial as it is if its workers run full garbage collections."""
    return replace(trial, ram=max(trial.ram, trial.collected))


def _filled(demand: Demand, batch: Batch, trial: LoaderTrial) -> LoaderTrial:
    """The trial scaled up to full queues, if its workers were too slow to fill them."""
    if demand.loader_kind != "torch" or not demand.num_workers or trial.filled:
        return trial
    if _batches(demand, batch, trial) is None and trial.short is not None:
        return trial  # it needs more than there is; whether the stream is long enough to fill the queues is not known
    missing = _full_queues(demand, batch, trial) - trial.shm
    if missing <= 0:
        return trial
    return replace(trial, shm=trial.shm + missing, ram=trial.ram + missing)


def _full_queues(demand: Demand, batch: Batch, trial: LoaderTrial) -> int:
    """Bytes in /dev/shm of all batches that are requested ahead, and of the one in use."""
    ahead, batches = demand.num_workers * demand.prefetch_factor, _batches(demand, batch, trial)
    if batches is not None:
        ahead = min(ahead, batches - 1)
    return (ahead + 1) * batch_pages(loaders_of(demand, batch)[0].tensors)


def _batches(demand: Demand, batch: Batch, trial: LoaderTrial) -> int | None:
    """Batches of an epoch; None if unknown."""
    return trial.batches if trial.whole else loaders_of(demand, batch)[0].batches


def overlap(demand: Demand, trial: LoaderTrial) -> tuple[int, int]:
    """Bytes of semaphores that overlapped between two epochs, and the most that can overlap.

    Workers that restart every epoch create semaphores before all threads with those of the last epoch have ended. How
    many overlap depends on timing, and is visible only if nothing else is in /dev/shm.
    """
    once = semaphores(demand.num_workers) // 2 * PAGE
    if demand.persistent_workers or not demand.num_workers or not once <= trial.shm <= 2 * once:
        return 0, 0
    seen = trial.shm - once
    return seen, max(seen + PAGE * trial.overlap, (demand.num_workers + 1) * PAGE)


def calibrated(demand: Demand, batch: Batch, measured: Need) -> Batch:
    """The batch, with its private memory adjusted so that the prediction matches the measurement."""
    predicted = need(workload_of(demand, batch, demand.ranks, demand.ranks)).ram
    makers = max(1, demand.num_workers) * demand.ranks
    making = sum(batch.tensors) if batch.making is None else batch.making
    return replace(batch, making=max(making, making + (measured.ram - predicted) // makers))


def may_grow(demand: Demand, batch: Batch, trial: LoaderTrial, *, forked: bool) -> int | None:
    """Bytes that further batches can add if memory keeps growing as in the trial; None: no upper bound."""
    if trial.whole or not trial.growth:
        return 0
    copied = trial.process * demand.num_workers if forked and demand.num_workers else None
    if batch.rows is None:
        return copied
    left = max(0, -(-batch.rows // (batch.samples * demand.ranks)) - trial.batches)
    further = trial.growth * -(-left // max(1, trial.growth_batches))
    return further if copied is None else min(further, copied)


def _text(demand: Demand, trial: LoaderTrial) -> str:
    workers = counted(demand.num_workers, *WORKERS)
    if not trial.batches:
        return say("peak memory of {workers} before the first batch, plus a margin", workers=workers)
    batches = counted(trial.batches, phrase("{count} batch per epoch"), phrase("{count} batches per epoch"))
    if trial.forked:
        return say(
            "peak memory that a loop with {workers} adds to this process, {batches}, plus a margin",
            workers=workers, batches=batches,
        )  # fmt: skip
    return say(
        "peak memory of the process and {workers}, {batches}, plus a margin",
        workers=workers, batches=batches,
    )  # fmt: skip


def _source(trial: LoaderTrial) -> str:
    if trial.whole:
        return say("measured in a trial run of two epochs on this machine")
    return say("measured in a trial run on this machine, the start of two epochs")


def free_amount(machine: Machine, name: str) -> int | None:
    """What is free of a pool; for file descriptors the whole limit, since it is per process."""
    pool = machine.pool(name)
    if pool is None:
        return None
    return pool.size if name == "fds" and pool.free is None else pool.free
