"""What a workload takes from each memory pool: predicted before it runs, or measured in a trial run.

Counts batches in flight of torch's DataLoader and of ours, semaphores, pinned memory, workers and their growth, models
and optimizer state on the host. While a worker makes a batch it holds the samples, what collate makes of them, and the
shared memory that the batch travels in.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from legroom.advice.plan_inputs import Batch, Demand, loaders_of, workload_of
from legroom.advice.safe_settings import PAGE, batches_in_flight, semaphores
from legroom.records import Box, Loader, Need, Term, Trial, Workload
from legroom.units import format_size
from legroom.words import counted, phrase, say

_HEADER = 64  # before each tensor under the file_system strategy; room for it costs at most a page otherwise
_PAGE_TABLES = 512  # one entry of 8 bytes for each page of 4096
_WORKER_FDS = 6  # both ends of its index queue, its sentinel, the sockets it hands tensors over by
_OWN_FDS = 32  # the interpreter, its libraries, standard streams, a log and a data file


def batch_pages(tensors: Iterable[int]) -> int:
    """Bytes that one batch takes in /dev/shm: whole pages for each tensor and its header."""
    return sum(-(-(nbytes + _HEADER) // PAGE) * PAGE for nbytes in tensors)


def flights(loader: Loader) -> int:
    """Batches that torch's loader may hold at once, the consumer's two included.

    While the next batch is fetched the last one is still bound, and that is so across epochs: the last batch of
    one epoch lives while the first of the next arrive. Hence one more than an epoch's batches.
    """
    most = batches_in_flight(loader.workers, loader.prefetch, again=loader.again)
    return _within_epoch(loader, most)


def _own_flights(loader: Loader) -> int:
    """The same without the batch that only workers still map: it is nobody's descriptor and not pinned."""
    return _within_epoch(loader, batches_in_flight(loader.workers, loader.prefetch))


def _within_epoch(loader: Loader, most: int) -> int:
    return most if loader.batches is None else min(most, loader.batches + 1)


def loader_semaphores(loader: Loader) -> int:
    """Semaphores of one loader; each takes a page."""
    return semaphores(loader.workers)


def pinned_size(nbytes: int) -> int:
    """What pinning so many bytes takes: torch's host allocator rounds up to powers of two."""
    return 1 << (nbytes - 1).bit_length() if nbytes > 0 else 0


def need(workload: Workload) -> Need:
    """What the workload takes from each pool, term by term."""
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


def _shm(workload: Workload) -> Iterator[Term]:
    count = workload.processes
    if workload.process_shm:
        yield Term(
            "shm",
            workload.process_shm * count,
            say("{each} a process{times}", each=format_size(workload.process_shm), times=_times(count)),
            workload.process_shm_source,
        )
    for loader in workload.loaders:
        if not loader.workers:
            continue
        yield Term(
            "shm",
            loader_semaphores(loader) * PAGE * count,
            _locks_text(loader, count),
            say("a page for each"),
        )
        if loader.kind == "legroom":
            continue
        batch = batch_pages(loader.tensors)
        text = say(
            "{flights} batches of {batch} in flight ({why}){times}",
            flights=flights(loader), batch=format_size(batch), why=_flights_text(loader), times=_times(count),
        )  # fmt: skip
        yield Term("shm", batch * flights(loader) * count, text, loader.source)
    if workload.nccl:
        text = say("NCCL, {each} a process{times}", each=format_size(workload.nccl), times=_times(count))
        yield Term("shm", workload.nccl * count, text, say("stated"))
    if workload.entries_shm:
        yield Term(
            "shm",
            workload.entries_shm,
            say("shared datasets, once for all"),
            workload.entries_shm_source or say("the data's description"),
        )


def _ram(workload: Workload) -> Iterator[Term]:
    count = workload.processes
    if workload.process_ram:
        text = say("{each} a process{times}", each=format_size(workload.process_ram), times=_times(count))
        yield Term("ram", workload.process_ram * count, text, workload.process_ram_source)
    if workload.host_model:
        text = say(
            "model and optimizer on the host, {each}{times}",
            each=format_size(workload.host_model), times=_times(count),
        )  # fmt: skip
        yield Term("ram", workload.host_model * count, text, workload.host_model_source)
    for loader in workload.loaders:
        yield from _loader_ram(workload, loader)
    tables = -(-workload.mapped // _PAGE_TABLES)
    if tables:
        readers = count * (1 + sum(loader.workers for loader in workload.loaders))
        text = say(
            "page tables, {each} for {mapped} mapped{times}",
            each=format_size(tables), mapped=format_size(workload.mapped), times=_times(readers),
        )  # fmt: skip
        yield Term("ram", tables * readers, text, say("8 bytes for each page"))


def _loader_ram(workload: Workload, loader: Loader) -> Iterator[Term]:
    count = workload.processes
    own = workload.worker_ram + loader.worker_growth
    if own and loader.workers:
        text = say(
            "{workers} of {each}{times}",
            workers=_workers(loader), each=format_size(own), times=_times(count),
        )  # fmt: skip
        source = workload.worker_ram_source or say("private to each worker")
        yield Term("ram", own * loader.workers * count, text, source)
    batch, makers = loader.batch_bytes, max(1, loader.workers)
    if loader.made_of:
        text = say(
            "a batch while it is made, {each} × {makers}{times}",
            each=format_size(loader.made_of), makers=makers, times=_times(count),
        )  # fmt: skip
        yield Term("ram", loader.made_of * makers * count, text, loader.source)
    if not loader.workers:
        text = say(
            "2 batches of {batch} in the process{times}", batch=format_size(batch), times=_times(count)
        )
        yield Term("ram", 2 * batch * count, text, loader.source)
    elif loader.kind == "legroom":
        yield from _arena(loader, own, count)


def _arena(loader: Loader, own: int, count: int) -> Iterator[Term]:
    """Our loader's batches, and what it wants to see free beside its workers before it starts them."""
    batch, slots = batch_pages(loader.tensors), loader.slots
    if slots is None:
        slots = loader.workers * (2 + loader.prefetch)
        text = say(
            "arena of {slots} batches of {batch} ({workers} × (2 + {prefetch})){times}",
            slots=slots, batch=format_size(batch), workers=_workers(loader), prefetch=loader.prefetch,
            times=_times(count),
        )  # fmt: skip
    else:
        text = say(
            "arena of {slots} batches of {batch}, one a worker and the one in use{times}",
            slots=slots, batch=format_size(batch), times=_times(count),
        )  # fmt: skip
    yield Term("ram", slots * batch * count, text, loader.source)
    free = spare(least(Each(own, loader.made_of, batch), loader.workers))
    text = say("{free} to spare beside the workers{times}", free=format_size(free), times=_times(count))
    yield Term("ram", free * count, text, say("an eighth, and 16 MB"))


def _pinned(workload: Workload) -> Iterator[Term]:
    count = workload.processes
    for loader in workload.loaders:
        if not loader.pin_memory:
            continue
        batch = sum(pinned_size(nbytes) for nbytes in loader.tensors)
        # The pinning thread empties the workers' queue, so all that is in flight may lie pinned before the consumer.
        held = _own_flights(loader) if loader.workers else 2
        text = say(
            "{held} pinned batches of {batch}, rounded up to powers of two{times}",
            held=held, batch=format_size(batch), times=_times(count),
        )  # fmt: skip
        yield Term("pinned", batch * held * count, text, loader.source)


def _charged(shm: Iterable[Term], pinned: Iterable[Term]) -> Iterator[Term]:
    """Shared and pinned memory are memory: the cgroup counts them."""
    yield Term("ram", _sum(shm), say("what lies in /dev/shm is memory too"), say("the sum of the shm terms"))
    yield Term("ram", _sum(pinned), say("pinned memory is memory too"), say("the sum of the pinned terms"))


def _disk(workload: Workload) -> Iterator[Term]:
    if workload.entries_disk:
        text = say("shared datasets on disk, once for all")
        yield Term("disk", workload.entries_disk, text, say("the data's description"))
    if workload.checkpoint:
        text = say(
            "checkpoints, {each} a process{times}",
            each=format_size(workload.checkpoint), times=_times(workload.processes),
        )  # fmt: skip
        yield Term("disk", workload.checkpoint * workload.processes, text, say("stated"))


def _fds(workload: Workload) -> Iterator[Term]:
    """Of one training process: it may hold a descriptor for every tensor in flight."""
    if not workload.loaders:
        return
    yield Term("fds", _OWN_FDS, say("the process itself"), say("an allowance"))
    for loader in workload.loaders:
        if not loader.workers:
            continue
        text = say("queues and sockets of {workers}", workers=_workers(loader))
        yield Term("fds", _WORKER_FDS * (loader.workers + 1), text, say("six for each, and for the results"))
        if loader.kind == "torch" and loader.sharing == "file_descriptor":
            text = say(
                "a descriptor for each tensor of {flights} batches",
                flights=_own_flights(loader),
            )  # fmt: skip
            yield Term("fds", _own_flights(loader) * len(loader.tensors), text, loader.source)


def _gpu(workload: Workload) -> Iterator[Term]:
    if workload.gpu is not None:
        text = say(
            "{each} a process, {count} on a card", each=format_size(workload.gpu), count=workload.per_gpu
        )
        yield Term("gpu", workload.gpu * workload.per_gpu, text, say("stated"))


def _flights_text(loader: Loader) -> str:
    most = batches_in_flight(loader.workers, loader.prefetch, again=loader.again)
    if flights(loader) < most:
        return say("{batches} in an epoch + 1", batches=loader.batches)
    beyond = 3 if loader.again else 2
    return say(
        "{workers} × {prefetch} + {beyond}",
        workers=_workers(loader), prefetch=loader.prefetch, beyond=beyond,
    )  # fmt: skip


def _workers(loader: Loader) -> str:
    return counted(loader.workers, phrase("{count} worker"), phrase("{count} workers"))


def _locks_text(loader: Loader, count: int) -> str:
    return say(
        "{locks} semaphores of a loader's queues{times}", locks=loader_semaphores(loader), times=_times(count)
    )


def _times(count: int) -> str:
    return say(" × {count}", count=count) if count != 1 else ""


SPARE = (
    16 << 20
)  # page tables, stacks, buffers of pipes: the cgroup counts them, and nobody can say them beforehand


@dataclass(frozen=True, slots=True)
class Each:
    """What one worker takes, in bytes."""

    own: int  # the process, before it draws a sample
    making: int  # more private memory at its height, while a batch is made
    batch: int  # in the slot

    @property
    def all(self) -> int:
        """Until its first batch is sent."""
        return self.own + self.making + self.batch


def least(each: Each, workers: int) -> int:
    """What so many workers take, each with one batch, and the one that the training looks at."""
    return workers * each.all + each.batch


def spare(need: int) -> int:
    """What must stay free beside a need: samples are not all alike, and an allocator keeps some of what is freed."""
    return SPARE + need // 8


def fits(need: int, free: int) -> bool:
    """Whether a need can be met and nobody is killed for it."""
    return need + spare(need) <= free


def most_workers(each: Each, free: int, asked: int) -> int:
    """How many workers fit, up to those asked for; 0 where none does."""
    return next((count for count in range(asked, 0, -1) if fits(least(each, count), free)), 0)


def most_samples(each: Each, free: int, workers: int, samples: int) -> int:
    """The largest batch that fits at these workers, below ``samples``, whose batch was measured; 0 where none does."""
    low, high = 0, samples  # low fits, or is no batch at all; high does not fit
    while high - low > 1:
        middle = (low + high) // 2
        smaller = Each(each.own, -(-each.making * middle // samples), -(-each.batch * middle // samples))
        if fits(least(smaller, workers), free):
            low = middle
        else:
            high = middle
    return low


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
    """Bytes that batches beyond the trial can add if it keeps growing as it did; None: it does not level off."""
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
