"""What this process holds on a card outside torch's allocator: the context, loaded kernels, libraries' own memory.

Covers: telling it by NVML's figure for this process, by the card's change while the context was made, or by a bound.
Does not cover: what is done with it (cap.py, accounting.py).

Inside a container NVML's pids may be the host's. Then the entry that is ours is found by its behaviour: a block is
allocated, and the one entry that grows by just that much is this process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from legroom.gpu.card import Card
from legroom.model.box import Gpu
from legroom.model.gpu import Overhead
from legroom.units import format_size
from legroom.words import say

# No context with cuBLAS and cuDNN loaded is smaller or, without memory of the libraries' own, larger: a difference
# outside says that somebody else came or went meanwhile.
_LEAST, _MOST = 100 << 20, 2 << 30
_ASSUMED = 1 << 30
_NUDGE = 46 << 20  # torch asks CUDA for a block of this size as it is: a multiple of 2 MB, above 20
_NEAR = 2 << 20


@dataclass(frozen=True, slots=True)
class Before:
    """The card before this process had a context there."""

    used: int


def card_before(card: Card) -> Before | None:
    """What NVML says of the card, where this process is not on it yet."""
    if card.has_context():
        return None
    shown = card.nvml()
    return None if shown is None or shown.used is None else Before(shown.used)


def overhead(card: Card, before: Before | None = None, *, nudge: bool = True) -> Overhead:
    """The best figure there is, and how it came about; the context exists by now."""
    card.synchronize()
    shown = card.nvml()
    reserved = card.reserved()
    own = own_bytes(shown, os.getpid())
    if own is not None and own >= reserved:
        return Overhead(
            own - reserved, "measured", say("NVML's figure for this process less torch's reserve")
        )
    if nudge and shown is not None and (own := _by_nudge(card, shown)) is not None and own >= reserved:
        source = say("NVML's figure for the process that grew when this one did (its pids are the host's)")
        return Overhead(own - reserved, "measured", source)
    if before is not None and shown is not None and shown.used is not None:
        grown = shown.used - before.used - reserved
        if _LEAST <= grown <= _MOST:
            source = say(
                "what the card lost while this process made its context; others may have moved meanwhile"
            )
            return Overhead(grown, "bounded", source)
    free, size = card.room()
    rest = size - free - reserved
    if rest <= _MOST:
        return Overhead(
            max(0, rest), "bounded", say("all of the card that is neither free nor torch's reserve")
        )
    source = say(
        "NVML does not show this process and others are on the card: {assumed} are assumed",
        assumed=format_size(_ASSUMED),
    )
    return Overhead(_ASSUMED, "assumed", source)


def own_bytes(shown: Gpu | None, pid: int) -> int | None:
    """What NVML says this process holds; None where it is not listed, not told, or a stranger bears its number."""
    for process in () if shown is None else shown.processes or ():
        if process.pid == pid and process.command is not None:
            return process.used
    return None


def _by_nudge(card: Card, shown: Gpu) -> int | None:
    """Which entry is ours, where none bears our pid."""
    before = _amounts(shown)
    if not before:
        return None
    reserved = card.reserved()
    try:
        block = card.torch.empty(_NUDGE, dtype=card.torch.uint8, device=card.name)
    except RuntimeError:  # no room for it: a limit in force, or a full card
        return None
    if card.reserved() - reserved != _NUDGE:  # served from the cache: nothing to be seen outside
        return None
    card.synchronize()
    after = card.nvml()
    del block
    card.empty_cache()
    return grown_by(before, _amounts(after), _NUDGE)


def grown_by(before: Mapping[int, int], after: Mapping[int, int], amount: int) -> int | None:
    """What the one process that grew by ``amount`` held before; None where it was none or more than one."""
    grew = [pid for pid, held in before.items() if abs(after.get(pid, 0) - held - amount) <= _NEAR]
    return before[grew[0]] if len(grew) == 1 else None


def _amounts(shown: Gpu | None) -> dict[int, int]:
    processes = () if shown is None else shown.processes or ()
    return {process.pid: process.used for process in processes if process.used is not None}
