"""A running job, a job's loaders and processes, what measuring a dataset gave, and the need and plan that follow."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from legroom.messages import say
from legroom.records.finding_and_alarm import Finding
from legroom.records.loader_settings_and_flags import CompleteLoaderSettings
from legroom.records.machine import Machine, Process

if TYPE_CHECKING:
    from legroom.records.settings_and_overrides import Settings  # which holds a Plan


@dataclass(frozen=True, slots=True)
class Job:
    """A running job: its processes, the flags on its command line, the pool that limits it."""

    pid: int
    command: str
    processes: tuple[Process, ...]
    flags: Mapping[str, str] = field(default_factory=dict)
    held: Mapping[str, int | None] = field(default_factory=dict)  # by pool
    binds: str | None = None
    binds_why: str = ""
    spellings: Mapping[str, str] = field(default_factory=dict)  # each flag as spelled on the command line
    notes: tuple[str, ...] = ()  # what the figures in ``held`` leave out or count twice


@dataclass(frozen=True, slots=True)
class Transport:
    """The cost of sending one batch from a worker, measured with real workers."""

    worker_seconds: float  # in the worker: copying into shared memory, pickling
    parent_seconds: float  # in the training process: receiving, mapping
    latency_seconds: float = 0.0  # latency of requesting a batch, without making it
    two_seconds: float = 0.0  # between batches with two workers and samples that cost nothing
    worker_ram: int | None = None  # private bytes of that worker; None: unknown
    source: str = "measured"


@dataclass(frozen=True, slots=True)
class Measured:
    """A measured dataset: bytes of a batch, bytes and seconds of a sample."""

    tensors: tuple[int, ...]  # bytes of each tensor of one batch, as collate gives them
    sample_bytes: int  # of one sample as the dataset returns it, on average
    sample_seconds: float  # to load one sample, without CPU time taken by other processes
    cpu_seconds: float  # CPU time of one sample, over all threads
    wait_seconds: float  # of sample_seconds, spent waiting: disk, network, sleep
    collate_seconds: float  # of one batch
    rows: int | None  # samples in the dataset; None: unknown
    source: str
    batch_size: int = 1
    samples: int = 0  # how many were drawn
    spread: float = 0.0  # standard deviation of a sample's seconds, as a share of their mean
    other_bytes: int = 0  # of one batch, besides its tensors: pickled through a pipe
    iterable: bool = False  # no __getitem__: every worker iterates over all of it unless it is sharded
    unsendable: str | None = None  # why a worker cannot send a batch; None: it can
    transport: Transport | None = None
    process_ram: int | None = None  # private bytes of the measuring process; None: unknown
    idle_worker: int | None = None  # private bytes of a worker before its first sample; None: unknown
    making: int | None = None  # private bytes while a batch is assembled: samples, and buffers of a custom collate_fn

    each: bool = False  # every sample has its own tensors: a larger batch has more of them
    loader: Mapping[str, Any] | None = None  # settings of the DataLoader that the dataset was given as

    def rows_of(self, ranks: int) -> int | None:
        """Samples in an epoch of all ranks: a sampler of the user gives each of them its own."""
        sampled = self.loader is not None and (self.loader["sampler"] or self.loader["batch_sampler"])
        return self.rows * ranks if sampled and self.rows else self.rows

    @property
    def batch_bytes(self) -> int:
        """The tensors of one batch."""
        return sum(self.tensors)

    @property
    def worker_seconds(self) -> float:
        """Seconds of one sample in a worker, where torch uses one thread only."""
        return max(self.sample_seconds, self.cpu_seconds + self.wait_seconds)


@dataclass(frozen=True, slots=True)
class CopiedAttribute:
    """A list or dict of a dataset whose pages forked workers copied while they read it."""

    name: str
    type: str
    bytes: int  # as Python objects, estimated from a sample
    copied: int  # by one worker in the trial run
    read: int  # of ``bytes``, what the samples hold that this worker read in it, if each holds one item


@dataclass(frozen=True, slots=True)
class LoaderTrial:
    """A trial run of the data loop without the model: peak use, or the pool that ran out."""

    ram: int  # bytes added by its processes and their batches, /dev/shm included
    shm: int  # at the peak; by chance with one batch more than ``waiting_shm``
    fds: int  # of its main process
    batches: int  # most batches loaded in an epoch
    process: int  # anonymous bytes of the main process before the first batch
    whole: bool  # two complete epochs; else as much as the time allowed
    filled: bool = False  # the queues were seen full
    overlap: bool = False  # semaphores of the second epoch failed while some of the first existed
    forked: bool = False  # in a fork of the calling process, whose own memory is not included
    waiting_shm: int = 0  # of ``shm``, while the loop paused and every queue was full; 0: that was not seen
    collected: int = 0  # the same as ``ram``, if forked workers run a full garbage collection; 0: they run none
    collection_expected: bool = False  # a program that imports the same runs it; else that is chance
    growth: int = 0  # growth of the peak in the last ``growth_batches`` of the first epoch
    growth_batches: int = 0
    short: str | None = None  # the pool that it ran out of: "ram", "shm" or "fds"
    unfinished: str | None = None  # why it is inconclusive
    said: str = ""  # the error it ended with
    copied: tuple[CopiedAttribute, ...] = ()  # attributes that forked workers copy, largest first

    def short_of(self, pool: str | None, why: str) -> LoaderTrial:
        """The same, ended early: a pool ran out, or the time."""
        if pool is None:
            return replace(self, unfinished=why)
        return replace(self, short=pool, said=why)


Fit = Literal["fits", "too-big", "unknown"]


@dataclass(frozen=True, slots=True)
class PlannedLoader(CompleteLoaderSettings):
    """One DataLoader of a job; a validation loader that is alive at the same time is another."""

    tensors: tuple[int, ...] = ()  # bytes of each tensor of one batch, as collate returns them
    batches: int | None = None  # per epoch; None: enough to fill every queue
    source: str = field(default_factory=lambda: say("given by you"))  # source of the batch size
    making: int | None = None  # private bytes while a batch is assembled; None: as many as the batch
    slots: int | None = None  # batches in the arena of legroom.DataLoader; None: as many as it wants

    @property
    def batch_bytes(self) -> int:
        """The payload of one batch."""
        return sum(self.tensors)

    @property
    def made_of(self) -> int:
        """Private bytes while a batch is assembled."""
        return self.batch_bytes if self.making is None else self.making


@dataclass(frozen=True, slots=True)
class Workload:
    """``processes`` training processes on one machine, each with the same DataLoaders."""

    processes: int = 1  # GPUs × jobs per GPU × ranks
    loaders: tuple[PlannedLoader, ...] = ()
    process_shm: int = 0  # /dev/shm of each process besides its DataLoaders
    process_shm_source: str = ""
    process_ram: int = 0  # interpreter, libraries, model and optimizer on the host: private bytes of each
    process_ram_source: str = ""
    host_model: int = 0  # weights, gradients and optimizer state that each process keeps in host memory
    host_model_source: str = ""
    worker_ram: int = 0  # private bytes of an idle worker
    worker_ram_source: str = ""  # where it was measured; may be empty
    entries_shm: int = 0  # shared datasets in memory: one copy for all processes
    entries_shm_source: str = ""  # empty: from the description of their files
    nccl: int = 0  # NCCL segments of one process
    mapped: int = 0  # bytes of data mapped by each process, for its page tables
    gpu: int | None = None  # of one process, if known
    per_gpu: int = 1  # processes per GPU
    checkpoint: int = 0  # bytes of the checkpoints kept on disk by one process


@dataclass(frozen=True, slots=True)
class Term:
    """One term of a need: bytes, pool, the calculation as text, and its source."""

    pool: str
    bytes: int
    what: str
    source: str


@dataclass(frozen=True, slots=True)
class Need:
    """What a workload needs of each pool. Unknown is None, not zero.

    ``ram`` includes ``shm`` and ``pinned``, which the cgroup counts too. ``fds`` is per process and ``gpu`` per GPU,
    like their limits.
    """

    terms: tuple[Term, ...]
    shm: int
    ram: int
    pinned: int
    fds: int
    disk: int
    gpu: int | None = None
    at_least: tuple[str, ...] = ()  # pools of which it may need more: not all of it is known


@dataclass(frozen=True, slots=True)
class ShmSizes:
    """Three sizes for /dev/shm, and what capped them, if anything did."""

    minimum: int
    recommended: int
    conservative: int
    capped_by: str | None = None


@dataclass(frozen=True, slots=True)
class PlanRow:
    """The need for one number of jobs per GPU."""

    jobs_per_gpu: int
    processes: int
    need: int
    recommended: int


@dataclass(frozen=True, slots=True)
class Problem:
    """A pool that is too small for a workload."""

    pool: str
    need: int
    free: int
    message: str
    fix: tuple[str, ...] = ()

    @property
    def missing(self) -> int:
        """Bytes that are missing."""
        return self.need - self.free


@dataclass(frozen=True, slots=True)
class Plan:
    """The need compared with a machine: the verdict, the pools that are too small, worst first, and fixes."""

    need: Need
    verdict: Fit
    problems: tuple[Problem, ...]
    unknown: Mapping[str, str] = field(default_factory=dict)  # pool: why it is unknown
    codes: Mapping[str, str] = field(default_factory=dict)  # pool: the reason of an unknown, for programs
    sizes: ShmSizes | None = None
    table: tuple[PlanRow, ...] = ()
    fits_now: int | None = None  # jobs per GPU that fit now; None: unknown, or no limit
    fix: tuple[str, ...] = ()
    settings: Settings | None = None  # the requested settings, or the largest that fit
    largest_batch: int | None = None  # samples, with the requested workers and prefetch; None: no limit, or unknown
    gpus: int | None = None
    jobs_per_gpu: int | None = None
    others: int | None = None  # bytes of /dev/shm used by other processes now
    measured: tuple[Job, ...] = ()  # running jobs that were measured
    from_loader: Mapping[str, Any] = field(default_factory=dict)  # settings that the DataLoader gave, by argument
    instead_of_loader: Mapping[str, Any] = field(default_factory=dict)  # as given, and as the DataLoader has it
    notes: tuple[str, ...] = ()  # what the figures do not include
    machine: Machine | None = None  # the machine it was compared with
    findings: tuple[Finding, ...] = ()  # about the dataset, from the trial run
