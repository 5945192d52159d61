"""Trying a batch: what every way of doing it has in common.

Covers: the protocol, and a trial with the bound it was held against. Does not cover: the ways: in this process, on a
card (meter_cuda.py), in a forked child (meter_fork.py), in a fresh child (meter_child.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from legroom.model.gpu import Trial

STEPS = (
    2  # of one trial: the first makes the optimizer's state, the second has it and the activations at once
)
Step = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Reading:
    """One trial, the bytes there were for it, and what else its meter has to say."""

    trial: Trial
    bound: int
    notes: tuple[str, ...] = ()


class Meter(Protocol):
    """Somebody who can try a batch. What a step raises, other than for memory, comes out of ``try_batch``."""

    measure: str
    rough: bool  # memory grows with the batch only roughly in a line

    def try_batch(self, batch: int) -> Reading:
        """Run the step with that batch; never raises for want of memory."""
        ...

    def close(self) -> None:
        """Put everything back."""
        ...


def call(step: Step, batch: int, worst_case: Any) -> None:
    """One step, at the worst case where one was named."""
    if worst_case is None:
        step(batch)
    else:
        step(batch, worst_case)
