"""An effective batch, made of batches that fit.

Covers: the accumulation that keeps it. Does not cover: finding what fits (finder.py).
"""

from __future__ import annotations

from legroom.errors import UsageError
from legroom.words import say

_AT_MOST = 2  # times the fewest steps, to divide the effective batch evenly


def split(largest: int, effective: int | None, ranks: int) -> tuple[int, int, str | None]:
    """(batch, accumulation, note): batch × accumulation × ranks is the effective batch, or the note says what it is."""
    if effective is None:
        return largest, 1, None
    if effective % ranks:
        raise UsageError(
            say("an effective batch of {effective} cannot be kept", effective=effective),
            why=say("{ranks} ranks do not divide it", ranks=ranks),
            fix=(say("ask for {near}", near=max(ranks, effective // ranks * ranks)),),
        )
    whole = effective // ranks
    fewest = -(-whole // largest)
    for steps in range(fewest, min(whole, _AT_MOST * fewest) + 1):
        if whole % steps == 0:
            return whole // steps, steps, None
    batch = -(-whole // fewest)
    note = say(
        "no batch up to {largest} divides {whole} samples a rank well: {steps} steps of {batch} make {made} instead of "
        "{effective}",
        largest=largest, whole=whole, steps=fewest, batch=batch, made=batch * fewest * ranks, effective=effective,
    )  # fmt: skip
    return batch, fewest, note
