"""What a training will do, and what it will take: the questions that plan, check and tune answer.

Covers: loaders, processes and ranks of a workload; the need that follows from them, term by term; what that
means on a box. Does not cover: computing any of it (budget), settings chosen for it (settings.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from legroom.model.advice import Job
from legroom.model.box import Box
from legroom.words import say

if TYPE_CHECKING:
    from legroom.model.settings import Settings  # which holds a Plan

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
