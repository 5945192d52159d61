"""GPU memory: an active limit, what uses it, a batch-size search, advice, an estimate."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["measured", "bounded", "assumed"]


@dataclass(frozen=True, slots=True)
class Overhead:
    """GPU memory of this process outside torch's allocator: CUDA context, kernels, libraries."""

    bytes: int | None  # None: unknown
    how: How
    source: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A process's limit of GPU memory, CUDA context included, and how it is enforced."""

    device: str
    asked: int  # bytes this process may use, everything included
    size: int  # of the GPU
    overhead: Overhead
    margin: int  # bytes reserved for kernels that are loaded later
    allowed: int  # what torch's allocator may reserve
    fraction: float  # the fraction passed to torch
    read_back: float | None  # the fraction torch reports now; None: not reported by this version
    reserved: int  # by torch's allocator when the limit was set
    others: int | None  # bytes used by other processes then
    bounded: tuple[str, ...]
    not_bounded: tuple[str, ...]
    notes: tuple[str, ...] = ()
    shared: int = 0  # bytes of copies that processes share: no part of any process's limit
    again: Callable[[], Limit] | None = field(default=None, repr=False, compare=False)

    @property
    def held(self) -> bool:
        """Whether this process was within the limit when it was set."""
        return self.reserved + (self.overhead.bytes or 0) <= self.asked

    def recheck(self) -> Limit:
        """Measure the overhead again and lower torch's part if it grew; never raises it."""
        return self if self.again is None else self.again()


@dataclass(frozen=True, slots=True)
class Tf32:
    """The TF32 flags as set."""

    on: bool
    family: Literal["allow_tf32", "fp32_precision"]
    flags: Mapping[str, object]  # as read back from torch
    capable: bool | None  # None: no CUDA device
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """What uses a GPU's memory. The known parts and ``unknown`` add up to ``used``."""

    device: str
    size: int
    used: int
    free: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # all other live tensors: activations, batches, your own
    cached: int  # reserved by torch's allocator and not in use
    overhead: Overhead
    others: int | None
    unknown: int  # used, by unknown owners
    stuck: int  # cached between live blocks: empty_cache() cannot release it
    largest_free: int | None  # the largest cached block: fits without a cudaMalloc
    retries: int  # times the allocator had to flush its cache
    ooms: int
    spilled: int | None  # Windows: spilled to the host's RAM
    pinned: int | None  # host memory of torch's pinned allocator
    reasons: Mapping[str, str] = field(default_factory=dict)  # by field: why it is None, or what it leaves out
    shared: int = 0  # copies that this process shares with others (resident=True, shared=True), counted once

    @property
    def fragmentation(self) -> float:
        """The share of torch's reserved memory that is free but cannot be released."""
        reserved = self.weights + self.gradients + self.optimizer + self.activations + self.cached
        return self.stuck / reserved if reserved else 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size, tried."""

    batch: int
    fits: bool
    peak: int | None  # bytes allocated at the peak; None: it ended before that was read
    steady: int | None = None  # allocated between two steps: weights, gradients, optimizer
    reserved: int | None = None  # bytes reserved by the allocator; None: unknown
    retries: int = 0
    seconds: float = 0.0
    why: str | None = None  # why it does not fit
    left_over: int = 0  # bytes that a failed trial left allocated


@dataclass(frozen=True, slots=True)
class BatchFound:
    """The largest batch size that fits, and the trials behind it."""

    batch: int  # to train with: the largest, or a smaller one that divides the effective batch
    largest: int  # the largest that fits
    accumulation: int  # steps to the effective batch
    effective_batch: int  # batch × accumulation × ranks
    ranks: int
    bound: int  # bytes available for the training's tensors
    margin: float
    trials: tuple[Trial, ...]
    fixed: int  # linear fit: bytes independent of the batch,
    per_sample: float  # and bytes per sample
    measure: str  # what was measured, and where
    notes: tuple[str, ...] = ()

    @property
    def cap(self) -> int:
        """The bound less the margin: what a batch must fit into."""
        return int(self.bound * (1 - self.margin))

    def predicted(self, batch: int) -> int:
        """Predicted peak bytes, by the linear fit."""
        return round(self.fixed + self.per_sample * batch)

    @property
    def curve(self) -> tuple[tuple[int, int], ...]:
        """(batch, peak bytes) of every trial that fits, by batch."""
        fitted = {trial.batch: trial.peak for trial in self.trials if trial.fits and trial.peak is not None}
        return tuple(sorted(fitted.items()))


@dataclass(frozen=True, slots=True)
class Saving:
    """One measure to save memory, and what it saves for this model."""

    name: str
    peak: int  # bytes with it
    frees: int  # compared with now; negative: it needs more
    how: Literal["measured", "traced"]
    what: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What each memory-saving measure would save, for one model and one batch."""

    device: str
    batch: int
    peak: int  # bytes now
    how: Literal["measured", "traced"]
    savings: tuple[Saving, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name: why it has no figure

    def get(self, name: str) -> Saving | None:
        """The saving of that name."""
        return next((saving for saving in self.savings if saving.name == name), None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """Estimated GPU memory of one training step, without running it on the GPU."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # at the peak, above weights, gradients and optimizer
    peak: int  # allocated, rounded as torch's allocator rounds
    error: float  # the peak is within this share of what is allocated
    how: Literal["traced", "extrapolated"]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {name: getattr(self, name) for name in self.__slots__}
