"""legroom.gpu.limit: this process's share of a card, its context counted in.

Covers: turning a share into torch's own cap, setting it, reading it back, saying what it does not bound, tightening it
later.
Does not cover: measuring what lies outside torch's allocator (overhead.py), the environment form (environment.py).

torch's fraction bounds its caching allocator alone. The context and loaded kernels come on top, so they are measured
and taken off first; kernels are loaded when they are first used, so some room is left for those to come.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

from legroom.errors import BadLimit
from legroom.gpu.amounts import Amount, asked_bytes, in_words
from legroom.gpu.card import Card, open_card
from legroom.gpu.overhead import card_before, overhead
from legroom.model.gpu import Limit, Overhead
from legroom.units import format_size
from legroom.words import phrase, say

_LATER = 256 << 20  # for kernels that are loaded after this
_LEAST_LATER = 16  # but never more than a sixteenth of the share
_HOW = {"bounded": phrase("bounded"), "assumed": phrase("assumed")}


def limit(
    amount: Amount | None = None,
    *,
    share: float | Fraction | None = None,
    device: Any = None,
) -> Limit:
    """Keep everything this process holds on a card within a share of it, its CUDA context counted in.

    A context is made if there is none. Raises NoCuda without a card and BadLimit for a share that cannot be.

    Args:
        amount: A share of the card, 0.8 or ``"80%"``, or an amount of bytes, ``"20GB"``.
        share: In its place: ``1 / 6`` for one of six jobs.
        device: The card; None is the current one.
    """
    asked = in_words(amount, share)
    card = open_card(device, say("this process would be limited to {asked}", asked=asked))
    return limit_card(card, amount, share)


def limit_card(card: Card, amount: Amount | None, share: float | Fraction | None = None) -> Limit:
    """The same for a device that is open."""
    asked_bytes(amount, share, card.torch_size())  # refused before a context is made for it
    before = card_before(card)
    card.warm_up()
    _, size = card.room()
    asked = asked_bytes(amount, share, size)
    outside = overhead(card, before)
    margin = min(_LATER, asked // _LEAST_LATER)
    allowed = asked - (outside.bytes or 0) - margin
    if allowed <= 0:
        raise BadLimit(
            say("{asked} are too little for a CUDA process", asked=format_size(asked)),
            why=say(
                "the context and the libraries' kernels alone take {outside} ({source})",
                outside=format_size(outside.bytes or 0), source=outside.source,
            ),
            fix=(say("ask for more than {least}", least=format_size((outside.bytes or 0) + 2 * _LATER)),
                 say("or share the card between fewer jobs")),
        )  # fmt: skip
    return _set(card, asked, size, outside, margin, allowed)


def _set(card: Card, asked: int, size: int, outside: Overhead, margin: int, allowed: int) -> Limit:
    if card.reserved() > allowed:  # what is only cached can go
        card.empty_cache()
    fraction = card.set_allowed(allowed)
    free, _ = card.room()
    reserved = card.reserved()
    others = max(0, size - free - reserved - (outside.bytes or 0))
    made = Limit(
        device=card.name,
        asked=asked,
        size=size,
        overhead=outside,
        margin=margin,
        allowed=allowed,
        fraction=fraction,
        read_back=card.fraction(),
        reserved=reserved,
        others=others,
        bounded=_bounded(card),
        not_bounded=_not_bounded(margin),
        notes=tuple(_notes(asked, size, reserved, allowed, others, outside)),
        again=lambda: _recheck(card, made),
    )
    return made


def _recheck(card: Card, old: Limit) -> Limit:
    outside = overhead(card)
    if outside.how != "measured" and old.overhead.how != "assumed":
        outside = old.overhead  # the first figure was the better one
    # What was left for later kernels is partly used by now; a quarter of it stays.
    allowed = min(old.allowed, old.asked - (outside.bytes or 0) - old.margin // 4)
    return _set(card, old.asked, old.size, outside, old.margin, max(1, allowed))


def _bounded(card: Card) -> tuple[str, ...]:
    if card.backend() == "native":
        return (
            say(
                "torch's caching allocator: tensors, cached blocks, cuBLAS and cuDNN workspaces, CUDA graphs"
            ),
        )
    return (
        say(
            "tensors in use; the {backend} allocator may keep freed blocks beyond the limit",
            backend=card.backend(),
        ),
    )


def _not_bounded(margin: int) -> tuple[str, ...]:
    return (
        say("NCCL's buffers, and whatever else calls cudaMalloc itself (other libraries, other allocators)"),
        say(
            "kernels loaded from now on: {margin} are left for them, and recheck() measures again",
            margin=format_size(margin),
        ),
        say("other processes, those started by this one too: each needs a limit of its own"),
    )


def _notes(asked: int, size: int, reserved: int, allowed: int, others: int, outside: Overhead) -> list[str]:
    notes = []
    if others > size - asked:
        notes.append(
            say(
                "other processes hold {others} of {size} now: {left} of the {asked} are there",
                others=format_size(others), size=format_size(size),
                left=format_size(max(0, size - others)), asked=format_size(asked),
            )
        )  # fmt: skip
    if reserved > allowed:
        notes.append(
            say(
                "torch holds {reserved} already and is allowed {allowed}: it gets nothing more until tensors are freed",
                reserved=format_size(reserved), allowed=format_size(allowed),
            )
        )  # fmt: skip
    if outside.how != "measured":
        notes.append(
            say(
                "the context is not measured but {how}: {source}",
                how=say(_HOW[outside.how]),
                source=outside.source,
            )
        )
    return notes
