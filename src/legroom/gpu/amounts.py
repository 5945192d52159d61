"""A process's share of a card, as people ask for it.

Covers: fractions, bytes, sizes in words and equal shares, turned into bytes or refused.
Does not cover: keeping it (cap.py).
"""

from __future__ import annotations

from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from legroom.errors import BadLimit, BadSize
from legroom.units import format_size, parse_size
from legroom.words import phrase, say

_FIX = (
    phrase("limit(0.8) for 80 % of the card, limit('20GB') or limit(20 << 30) for bytes"),
    phrase("limit(share=1/6) where six jobs share one card"),
)
ANY_CARD = 1 << 50  # larger than any card: only what no card could give is refused of it
Amount = float | int | str


def asked_bytes(amount: Amount | None, share: float | Fraction | None, size: int) -> int:
    """Bytes of a card of ``size`` that were asked for; BadLimit where that makes no sense."""
    asked = _asked(amount, share)
    if not isinstance(asked, int):
        return int(size * asked)
    if not 0 < asked <= size:
        why = (
            say("the card has {size}", size=format_size(size)) if asked > 0 else say("nothing fits into that")
        )
        raise _refused(format_size(asked), why)
    return asked


def in_words(amount: Amount | None, share: float | Fraction | None) -> str:
    """What was asked for, where there is no card yet to take it of; BadLimit where no card could give it."""
    asked_bytes(amount, share, ANY_CARD)
    asked = _asked(amount, share)
    if isinstance(asked, int):
        return say("{size} of its memory", size=format_size(asked))
    return say("{percent} % of its memory", percent=f"{float(100 * asked):.3g}")


def _asked(amount: Amount | None, share: float | Fraction | None) -> int | float | Fraction:
    """Bytes, an int, or a part of the card, which is no int."""
    if (amount is None) == (share is None):
        both = (
            say("nothing was asked for") if amount is None else say("a limit and a share exclude each other")
        )
        raise BadLimit(
            both,
            why=say("one of them says how much of the card this process may hold"),
            fix=tuple(map(say, _FIX)),
        )
    if share is not None:
        return _part(share, say("a share"))
    if isinstance(amount, str):
        amount = _read(amount)
    if isinstance(amount, bool) or not isinstance(amount, Real):
        raise _refused(amount, say("it is neither a fraction nor bytes"))
    if not isinstance(amount, Integral) or amount == 1:
        return _part(amount, say("a fraction"))
    return int(amount)


def _read(text: str) -> float | int:
    """``0.8``, ``1/6``, ``80%`` or a size; as an environment variable carries it."""
    plain = text.strip()
    try:
        if plain.endswith("%"):
            return float(Fraction(plain[:-1].strip()) / 100)
        number = Fraction(plain)
    except (ValueError, ZeroDivisionError):
        try:
            return parse_size(plain)
        except BadSize as problem:
            raise _refused(text, problem.why) from problem
    return int(number) if number.denominator == 1 and number != 1 else float(number)


def _part(amount: Any, what: str) -> float | Fraction:
    try:
        right = 0 < amount <= 1
    except TypeError:
        right = False
    if not right:
        raise _refused(amount, say("{what} is above 0 and at most 1", what=what))
    return amount if isinstance(amount, Fraction) else float(amount)


def _refused(amount: object, why: str) -> BadLimit:
    return BadLimit(say("{amount} cannot be a limit", amount=amount), why=why, fix=tuple(map(say, _FIX)))
