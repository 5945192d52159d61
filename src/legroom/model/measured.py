"""What a few samples of a dataset told: their bytes and their seconds.

Covers: the figures that check and tune rest on. Does not cover: taking them (loader).
"""

from __future__ import annotations

from dataclasses import dataclass, replace


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
