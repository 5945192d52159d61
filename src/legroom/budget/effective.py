"""The effective batch: batch × accumulation × ranks, which no choice may change silently.

Covers: splitting it, and saying what would fit when it cannot be split. Does not cover: which split is best.
"""

from __future__ import annotations

from legroom.errors import UsageError
from legroom.system.argument_checks import check_integer
from legroom.words import say


def per_rank(batch: int, effective: int | None, ranks: int) -> int:
    """Samples of one optimizer step on one rank; without an effective batch asked for, one batch."""
    batch = check_integer("batch_size", batch, 1)
    ranks = check_integer("ranks", ranks, 1)
    if effective is None:
        return batch
    effective = check_integer("effective_batch", effective, 1)
    step = batch * ranks
    if effective % step:
        below = effective // step * step
        near = say("{below} or {above}", below=below, above=below + step) if below else str(step)
        raise UsageError(
            say("an effective batch of {effective} cannot be kept", effective=effective),
            why=say("batch {batch} × {ranks} ranks = {step} samples at a time, and {effective} is no multiple of it",
                    batch=batch, ranks=ranks, step=step, effective=effective),
            fix=(
                say("the nearest that can be: {near}", near=near),
                say("or a batch of {sizes}", sizes=_batches(batch, effective, ranks)),
            ),
        )  # fmt: skip
    return effective // ranks


def smaller_batches(batch: int, together: int) -> list[int]:
    """Batches below ``batch`` that still divide ``together``, the largest first."""
    return [size for size in range(batch - 1, 0, -1) if together % size == 0]


def _batches(batch: int, effective: int, ranks: int) -> str:
    if effective % ranks:
        return say("any size, once the ranks divide it")
    whole = effective // ranks
    below = next((size for size in range(min(batch, whole), 0, -1) if whole % size == 0), 1)
    above = next((size for size in range(batch, whole + 1) if whole % size == 0), None)
    return str(below) if above is None else say("{below} or {above}", below=below, above=above)
