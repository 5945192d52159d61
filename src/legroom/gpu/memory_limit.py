"""legroom.gpu.limit: this process's share of a card, its context counted in.

Covers: turning a share into torch's own cap, setting it, reading it back, saying what it does not bound, tightening it
later.
Does not cover: measuring what lies outside torch's allocator (overhead.py), the environment form (environment.py).

torch's fraction bounds its caching allocator alone. The context and loaded kernels come on top, so they are measured
and taken off first; kernels are loaded when they are first used, so some room is left for those to come.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from fractions import Fraction
from numbers import Integral, Real
from typing import Any

from legroom.errors import BadLimit, BadSize, LegroomError
from legroom.gpu.cuda_device import CudaDevice, import_torch, open_device
from legroom.gpu.memory_account import measure_overhead, used_before_context
from legroom.model.gpu import Limit, Overhead
from legroom.units import format_size, parse_size
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
    asked = describe_amount(amount, share)
    card = open_device(device, say("this process would be limited to {asked}", asked=asked))
    return limit_device(card, amount, share)


def limit_device(card: CudaDevice, amount: Amount | None, share: float | Fraction | None = None) -> Limit:
    """The same for a device that is open."""
    limit_bytes(amount, share, card.torch_size())  # refused before a context is made for it
    before = used_before_context(card)
    card.warm_up()
    _, size = card.room()
    asked = limit_bytes(amount, share, size)
    outside = measure_overhead(card, before)
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


def _set(card: CudaDevice, asked: int, size: int, outside: Overhead, margin: int, allowed: int) -> Limit:
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


def _recheck(card: CudaDevice, old: Limit) -> Limit:
    outside = measure_overhead(card)
    if outside.how != "measured" and old.overhead.how != "assumed":
        outside = old.overhead  # the first figure was the better one
    # What was left for later kernels is partly used by now; a quarter of it stays.
    allowed = min(old.allowed, old.asked - (outside.bytes or 0) - old.margin // 4)
    return _set(card, old.asked, old.size, outside, old.margin, max(1, allowed))


def _bounded(card: CudaDevice) -> tuple[str, ...]:
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


VARIABLE = "LEGROOM_GPU_LIMIT"
_NO_CARD = 1 << 20  # bytes: who gives fewer means another unit


def with_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment with a limit for whatever is started in it; BadLimit for one that makes no sense."""
    asked = limit_bytes(amount, None, ANY_GPU)
    if asked < _NO_CARD and amount.strip().replace(".", "").isdigit():
        why = say("a number without a unit is bytes: is it {amount}% or {amount}GB?", amount=amount.strip())
        raise BadLimit(say("{amount} cannot be a limit", amount=amount), why=why)
    return {**environment, VARIABLE: amount}


def apply_from_environment(torch: Any = None, environment: Mapping[str, str] | None = None) -> bool:
    """Put the limit in force when torch starts CUDA in this process; False: there is none to put.

    To be called once torch is imported. Whatever fails is told on standard error: the script must run.
    """
    env = os.environ if environment is None else environment
    amount = env.get(VARIABLE, "").strip()
    if not amount:
        return False
    torch = import_torch(torch)
    # Torch keeps calls for the moment CUDA starts and makes them then; seeds are set in the same way.
    later = getattr(torch.cuda, "_lazy_call", None)
    if later is None:
        _tell(
            say(
                "no limit on the card: torch {version} offers no way to act when CUDA starts",
                version=torch.__version__,
            )
        )
        return False
    later(lambda: _apply(torch, amount, env))
    return True


def chosen_index(environment: Mapping[str, str], count: int, current: int) -> int:
    """The device that is this process's own."""
    try:
        local = int(environment.get("LOCAL_RANK", ""))
    except ValueError:
        return current
    return local if 0 <= local < count else current


def _apply(torch: Any, amount: str, environment: Mapping[str, str]) -> None:
    try:
        index = chosen_index(environment, torch.cuda.device_count(), torch.cuda.current_device())
        made = limit_device(CudaDevice(torch, index), amount)
    except LegroomError as problem:
        _tell(say("no limit on the card: {problem}", problem=problem))
    except Exception as problem:  # whatever CUDA says while it starts
        _tell(say("no limit on the card: {kind}: {problem}", kind=type(problem).__name__, problem=problem))
    else:
        _tell(
            say(
                "{device} is limited to {asked} of {size}, context included ({allowed} for torch)",
                device=made.device, asked=format_size(made.asked), size=format_size(made.size),
                allowed=format_size(made.allowed),
            )
        )  # fmt: skip
        for note in made.notes:
            _tell(note)


def _tell(line: str) -> None:
    sys.stderr.write(f"legroom: {line}\n")


_FIX = (
    phrase("limit(0.8) for 80 % of the card, limit('20GB') or limit(20 << 30) for bytes"),
    phrase("limit(share=1/6) where six jobs share one card"),
)
ANY_GPU = 1 << 50  # larger than any card: only what no card could give is refused of it
Amount = float | int | str


def limit_bytes(amount: Amount | None, share: float | Fraction | None, size: int) -> int:
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


def describe_amount(amount: Amount | None, share: float | Fraction | None) -> str:
    """What was asked for, where there is no card yet to take it of; BadLimit where no card could give it."""
    limit_bytes(amount, share, ANY_GPU)
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
