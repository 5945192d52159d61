"""What is said about a card's memory: a limit in force, an account, a batch size found, advice, an estimate.

Covers: the records. Does not cover: measuring any of it (gpu).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

How = Literal["measured", "bounded", "assumed"]


@dataclass(frozen=True, slots=True)
class Overhead:
    """What this process holds on a card outside torch's allocator: context, loaded kernels, libraries' own memory."""

    bytes: int | None  # None: could not be told
    how: How
    source: str


@dataclass(frozen=True, slots=True)
class Limit:
    """A process's share of a card, context included, and how it is kept."""

    device: str
    asked: int  # bytes of the card that this process may hold, everything included
    size: int  # of the card
    overhead: Overhead
    margin: int  # bytes left for kernels that are loaded later
    allowed: int  # what torch's allocator may reserve
    fraction: float  # as torch was told
    read_back: float | None  # as torch says it now; None: this torch does not tell
    reserved: int  # by torch's allocator when the limit was set
    others: int | None  # bytes that everybody else held then
    bounded: tuple[str, ...]
    not_bounded: tuple[str, ...]
    notes: tuple[str, ...] = ()
    again: Callable[[], Limit] | None = field(default=None, repr=False, compare=False)

    @property
    def held(self) -> bool:
        """Whether everything this process held when it was set lies within the share."""
        return self.reserved + (self.overhead.bytes or 0) <= self.asked

    def recheck(self) -> Limit:
        """Measure the overhead again and tighten torch's part where it grew: never loosens."""
        return self if self.again is None else self.again()


@dataclass(frozen=True, slots=True)
class Tf32:
    """TF32 as it was set."""

    on: bool
    family: Literal["allow_tf32", "fp32_precision"]
    flags: Mapping[str, object]  # as read back, in that family
    capable: bool | None  # None: no CUDA device to ask
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Account:
    """A card's memory, split. The parts that are known add up with ``unknown`` to ``used``."""

    device: str
    size: int
    used: int
    free: int
    weights: int
    gradients: int
    optimizer: int
    activations: int  # every other tensor that is alive: activations, batches, the user's own
    cached: int  # held by torch's allocator and free to it
    overhead: Overhead
    others: int | None
    unknown: int  # used, and by whom cannot be told
    stuck: int  # cached between live blocks: empty_cache() cannot give it back
    largest_free: int | None  # the largest cached block: what still fits without asking the card
    retries: int  # times the allocator had to flush its cache to go on
    ooms: int
    spilled: int | None  # Windows: in the host's RAM
    pinned: int | None  # host memory held by torch's pinned allocator
    reasons: Mapping[str, str] = field(
        default_factory=dict
    )  # by field: why it is None, or what it leaves out

    @property
    def fragmentation(self) -> float:
        """The share of torch's reserved memory that is free and cannot be given back."""
        reserved = self.weights + self.gradients + self.optimizer + self.activations + self.cached
        return self.stuck / reserved if reserved else 0.0


@dataclass(frozen=True, slots=True)
class Trial:
    """One batch size, tried."""

    batch: int
    fits: bool
    peak: int | None  # bytes allocated at the peak; None: it died before that could be read
    steady: int | None = None  # allocated between two steps: weights, gradients, optimizer
    reserved: int | None = None  # what the allocator held for it; None: there is no such figure
    retries: int = 0
    seconds: float = 0.0
    why: str | None = None  # why it does not fit
    left_over: int = 0  # bytes that a failed trial left allocated


@dataclass(frozen=True, slots=True)
class BatchFound:
    """The largest batch that fits, and how that is known."""

    batch: int  # to train with: the largest, or less where that divides the effective batch
    largest: int  # that fitted
    accumulation: int  # steps to the effective batch
    effective_batch: int  # batch × accumulation × ranks
    ranks: int
    bound: int  # bytes that there are for the training's tensors
    margin: float
    trials: tuple[Trial, ...]
    fixed: int  # the line: bytes whatever the batch,
    per_sample: float  # and bytes a sample
    measure: str  # what was measured, and where
    notes: tuple[str, ...] = ()

    @property
    def cap(self) -> int:
        """The bound less the margin: what a batch was held against."""
        return int(self.bound * (1 - self.margin))

    def predicted(self, batch: int) -> int:
        """Bytes at the peak, by the line."""
        return round(self.fixed + self.per_sample * batch)

    @property
    def curve(self) -> tuple[tuple[int, int], ...]:
        """(batch, peak bytes) of every trial that fitted, by batch."""
        fitted = {trial.batch: trial.peak for trial in self.trials if trial.fits and trial.peak is not None}
        return tuple(sorted(fitted.items()))


@dataclass(frozen=True, slots=True)
class Saving:
    """One thing that can be done, and what it frees for this model."""

    name: str
    peak: int  # bytes with it
    frees: int  # against now; negative: it needs more
    how: Literal["measured", "traced"]
    what: str


@dataclass(frozen=True, slots=True)
class Advice:
    """What each step towards less memory would free, for one model and one batch."""

    device: str
    batch: int
    peak: int  # bytes now
    how: Literal["measured", "traced"]
    savings: tuple[Saving, ...]
    left_out: Mapping[str, str] = field(default_factory=dict)  # by name: why it has no number

    def get(self, name: str) -> Saving | None:
        """The saving of that name."""
        return next((saving for saving in self.savings if saving.name == name), None)


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one training step will take of a card, without having run it there."""

    weights: int
    gradients: int
    optimizer: int
    activations: int  # at the peak, above weights, gradients and optimizer
    peak: int  # allocated, rounded as torch's allocator rounds
    error: float  # the peak is within this share of what is allocated
    how: Literal["traced", "extrapolated"]
    notes: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """As JSON carries it."""
        return {name: getattr(self, name) for name in self.__slots__}
