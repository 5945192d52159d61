"""What the demo measured. Covers: the nouns of its acts, and all of it as JSON. Does not cover: how it is shown."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from legroom.demo.stage import Weight

SCHEMA = "legroom.demo/1"
SEPARATE, SHARED = "separate", "shared"


@dataclass(frozen=True, slots=True)
class Training:
    """One training that shared its data."""

    name: str
    steps: int
    finished: bool
    loss: float | None
    starts: int


@dataclass(frozen=True, slots=True)
class Opening:
    """Seconds until a training had its data; ``ready``: with every page mapped."""

    at_once: float  # all of them: one loads the data, the others wait for it
    later: float | None  # one that came when they were there
    later_ready: float | None
    plain: float  # a copy of its own, read by h5py, with nobody else at work
    plain_at_once: float  # all of them, each with a copy of its own
    backing: str


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes that all trainings held together at their peak (PSS)."""

    separate: int | None
    shared: int | None


@dataclass(frozen=True, slots=True)
class Rescue:
    """The training that was killed on purpose."""

    name: str
    signal: int
    at_step: int
    verdict: str | None
    confidence: float | None
    summary: str | None
    evidence: tuple[str, ...]
    resumed_from: int | None
    back_after: float | None  # seconds from the kill to the next step


@dataclass(frozen=True, slots=True)
class Trial:
    """A loader with workers in this /dev/shm."""

    loader: str
    batch_bytes: int
    delivered: int
    of: int
    died: bool
    stood_still: bool
    verdict: str | None
    confidence: float | None
    shm_peak: int | None


@dataclass(frozen=True, slots=True)
class Loaders:
    """torch's loader and ours; ``why``: what was not tried, and the reason."""

    trials: tuple[Trial, ...] = ()
    rates: Mapping[str, float] | None = None  # batches a second: torch, legroom, batches
    batch_bytes: int | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """Everything."""

    machine: Mapping[str, Any]
    shm_size: int | None
    shm_own: bool  # made for the demo
    shm_why: str | None  # it was not
    data_bytes: int
    rows: int
    engine: str
    notes: tuple[str, ...]
    trainings: tuple[Training, ...]
    memory: Memory
    opening: Opening
    rescue: Rescue
    loaders: Loaders
    weights: tuple[Weight, ...]
    marks: tuple[tuple[float, str], ...]
    seconds: float


def as_object(result: Result, picture: str | None, kept: str | None) -> dict[str, Any]:
    """As other programs read it."""
    body = asdict(result)
    body["weights"] = [
        {"when": round(weight.when, 3), "act": weight.act, "held": dict(weight.held)}
        for weight in result.weights
    ]
    body["marks"] = [{"when": round(when, 3), "text": text} for when, text in result.marks]
    return {"schema": SCHEMA, **body, "picture": picture, "kept": kept}
