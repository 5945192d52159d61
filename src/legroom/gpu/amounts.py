"""A process's share of a card, as people ask for it.

Covers: fractions, bytes, sizes in words and equal shares, turned into bytes or refused.
Does not cover: keeping it (cap.py).
"""

from __future__ import annotations

from fractions import Fraction

from legroom.errors import BadLimit, BadSize
from legroom.units import format_size, parse_size
from legroom.words import phrase, say

_FIX = (
    phrase("limit(0.8) for 80 % of the card, limit('20GB') or limit(20 << 30) for bytes"),
    phrase("limit(share=1/6) where six jobs share one card"),
)
Amount = float | int | str


def asked_bytes(amount: Amount | None, share: float | Fraction | None, size: int) -> int:
    """Bytes of a card of ``size`` that were asked for; BadLimit where that makes no sense."""
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
        return _part(share, size, say("a share"))
    assert amount is not None
    if isinstance(amount, bool):
        raise _refused(amount, say("it is neither a fraction nor bytes"))
    if isinstance(amount, str):
        amount = _read(amount)
    if isinstance(amount, float) or amount == 1:
        return _part(amount, size, say("a fraction"))
    if not 0 < amount <= size:
        why = (
            say("the card has {size}", size=format_size(size))
            if amount > 0
            else say("nothing fits into that")
        )
        raise _refused(format_size(amount), why)
    return amount


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


def _part(amount: float | Fraction, size: int, what: str) -> int:
    try:
        right = 0 < amount <= 1
    except TypeError:
        right = False
    if not right:
        raise _refused(amount, say("{what} is above 0 and at most 1", what=what))
    return int(size * amount)


def _refused(amount: object, why: str) -> BadLimit:
    return BadLimit(say("{amount} cannot be a limit", amount=amount), why=why, fix=tuple(map(say, _FIX)))
