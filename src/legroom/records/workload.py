"""A job's loaders and processes, what measuring a dataset gave, and the need and plan that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal

from legroom.records.findings import Job
from legroom.records.machine import Box
from legroom.words import say

if TYPE_CHECKING:
    from legroom.records.settings import Settings  # which holds a Plan


@dataclass(frozen=True, slots=True)
class Transport:
    """What one batch costs on its way from a worker, measured with a real worker; None where not measured."""

    worker_seconds: float  # in the worker: copying into shared memory, pickling
    parent_seconds: float  # in the process that trains: receiving, mapping
    latency_seconds: float = 0.0  # from asking a worker for a batch to having it, beyond the work itself
    two_seconds: float = 0.0  # from batch to batch with two workers whose samples cost nothing
    worker_ram: int | None = None  # private bytes of that worker; None: could not be read
    source: str = "measured"


@dataclass(frozen=True, slots=True)
class Measured:
    """A dataset, drawn from: one batch's bytes, one sample's bytes and seconds."""

    tensors: tuple[int, ...]  # bytes of each tensor of one batch, as collate gives them
    sample_bytes: int  # of one sample as the dataset gives it, on average
    sample_seconds: float  # until one sample is there, less what other processes took of the CPU meanwhile
    cpu_seconds: float  # CPU time of one sample, over all threads
    wait_seconds: float  # of sample_seconds, spent waiting: disk, network, sleep
    collate_seconds: float  # of one batch
    rows: int | None  # samples in the dataset; None: it does not say
    source: str
    batch_size: int = 1
    samples: int = 0  # how many were drawn
    spread: float = 0.0  # standard deviation of a sample's seconds, as a share of their mean
    other_bytes: int = 0  # of one batch, beside its tensors: what is pickled through a pipe
    iterable: bool = False  # no __getitem__: every worker walks all of it unless it shards itself
    unsendable: str | None = None  # why a batch cannot come from a worker; None: it can
    transport: Transport | None = None
    process_ram: int | None = None  # private bytes of the process that measured; None: could not be read
    idle_worker: int | None = None  # private bytes of a worker before it draws; None: could not be read
    making: int | None = (
        None  # private bytes while one batch is made: its samples, and what a collate of its own makes
    )

    each: bool = False  # every sample brings tensors of its own: a larger batch has more of them

    @property
    def batch_bytes(self) -> int:
        """The tensors of one batch."""
        return sum(self.tensors)

    @property
    def worker_seconds(self) -> float:
        """One sample in a worker, where torch leaves one thread to what used several here."""
        return max(self.sample_seconds, self.cpu_seconds + self.wait_seconds)


@dataclass(frozen=True, slots=True)
class Trial:
    """A loop that was run for real, without its model: what it took at its peak, or what it ran out of."""

    ram: int  # bytes above what was used before: its processes and their batches, in /dev/shm too
    shm: int
    fds: int  # of its main process
    batches: int  # the most it loaded in an epoch
    process: int  # anonymous bytes of the main process before the first batch
    whole: bool  # two epochs to their ends; else as much as the time allowed
    filled: bool = False  # the queues were seen with every batch in them that the workers were asked for
    overlap: bool = (
        False  # no room for the semaphores of the second epoch while some of the first were there still
    )
    forked: bool = False  # in a fork of the process that asked: what that one holds is not in the figures
    growth: int = 0  # by which the peak rose in the last ``growth_batches`` of the first epoch
    growth_batches: int = 0
    short: str | None = None  # the pool that it ran out of: "ram", "shm" or "fds"
    unfinished: str | None = None  # why it says neither yes nor no
    said: str = ""  # the error it ended with

    def short_of(self, pool: str | None, why: str) -> Trial:
        """The same, ended early: for a pool, or for want of time."""
        if pool is None:
            return replace(self, unfinished=why)
        return replace(self, short=pool, said=why)


Fit = Literal["fits", "too-big", "unknown"]
Sharing = Literal["file_descriptor", "file_system"]


def _stated() -> str:
    return say("stated")


def _none_stated() -> str:
    return say("none stated")


@dataclass(frozen=True, slots=True)
class Loader:
    """One data loader that is alive during the training; a validation loader is another."""

    tensors: tuple[int, ...]  # bytes of each tensor of one batch, as collate gives them
    workers: int = 0
    prefetch: int = 2
    batches: int | None = None  # in an epoch; None: enough to fill every queue
    again: bool = True  # workers start anew for every epoch; not where they are persistent, or for one epoch
    pin_memory: bool = False
    kind: Literal["torch", "legroom"] = "torch"
    sharing: Sharing = "file_descriptor"
    worker_growth: int = 0  # private bytes that each worker comes to hold (copy on read, its own buffers)
    source: str = field(default_factory=_stated)  # where the batch's bytes come from
    making: int | None = (
        None  # private bytes while one batch is made; None: its samples, as many bytes as the batch
    )
    slots: int | None = None  # batches of our loader's arena; None: as many as it would like

    @property
    def batch_bytes(self) -> int:
        """The payload of one batch."""
        return sum(self.tensors)

    @property
    def made_of(self) -> int:
        """Private bytes while one batch is made."""
        return self.batch_bytes if self.making is None else self.making


@dataclass(frozen=True, slots=True)
class Workload:
    """Trainings of one kind on one box: ``processes`` of them, each with the same loaders."""

    processes: int = 1  # GPUs × jobs a GPU × ranks
    loaders: tuple[Loader, ...] = ()
    process_shm: int = 0  # what each process holds in /dev/shm besides its loaders
    process_shm_source: str = field(default_factory=_none_stated)
    process_ram: int = 0  # interpreter, libraries, model and optimizer on the host: private bytes of each
    process_ram_source: str = field(default_factory=_none_stated)
    host_model: int = 0  # weights, gradients and optimizer state that each process keeps in host memory
    host_model_source: str = field(default_factory=_none_stated)
    worker_ram: int = 0  # private bytes of an idle worker, before worker_growth
    worker_ram_source: str = ""  # where that was measured; empty: not said
    entries_shm: int = 0  # shared datasets in memory: once for all processes
    entries_shm_source: str = ""  # empty: from the description of their files
    entries_disk: int = 0
    nccl: int = 0  # segments of one process
    mapped: int = 0  # bytes of data mapped by each process, for its page tables
    gpu: int | None = None  # of one process, where it is known
    per_gpu: int = 1  # processes that share one card
    checkpoint: int = 0  # bytes of the checkpoints kept on disk by one process


@dataclass(frozen=True, slots=True)
class Term:
    """One summand of a need: how many bytes from which pool, the arithmetic in words, and its source."""

    pool: str
    bytes: int
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a workload takes from each pool. A pool that nothing is known about is None, not zero.

    ``ram`` includes ``shm`` and ``pinned``: both are memory, and the cgroup counts them. ``fds`` is of one process
    and ``gpu`` of one card, because that is where those limits are.
    """

    terms: tuple[Term, ...]
    shm: int
    ram: int
    pinned: int
    fds: int
    disk: int
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class ShmSizes:
    """Three sizes for /dev/shm, and what capped them, if anything did."""

    minimum: int
    recommended: int
    conservative: int
    capped_by: str | None = None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The need at one number of jobs a GPU."""

    jobs_per_gpu: int
    processes: int
    need: int
    recommended: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A pool that a workload does not fit into."""

    pool: str
    need: int
    free: int
    message: str
    fix: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """By how much it is too big."""
        return self.need - self.free


@dataclass(frozen=True, slots=True)
class Plan:
    """Need against Box: the verdict, the pools that break, first the one that breaks worst, and what to do."""

    need: Need
    verdict: Fit
    problems: tuple[Problem, ...]
    unknown: Mapping[str, str] = field(default_factory=dict)  # pool: why it could not be judged
    codes: Mapping[str, str] = field(default_factory=dict)  # pool: the reason of an unknown, for programs
    sizes: ShmSizes | None = None
    table: tuple[PlanRow, ...] = ()
    fits_now: int | None = None  # jobs a GPU that fit what is free now; None: unknown, or nothing bounds them
    fix: tuple[str, ...] = ()
    settings: Settings | None = None  # the largest that fit, or what was asked for where that fits
    largest_batch: int | None = None  # samples, at the workers and prefetch asked for
    gpus: int | None = None
    jobs_per_gpu: int | None = None
    others: int | None = None  # bytes of /dev/shm that others hold now
    measured: tuple[Job, ...] = ()  # running trainings that the need was taken from
    notes: tuple[str, ...] = ()  # what the figures leave out
    box: Box | None = None  # the box it was held against
