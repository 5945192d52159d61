"""LEGROOM_GPU_LIMIT: a limit for scripts that cannot be edited.

Covers: the variable, checking it before a child is started with it, and putting it in force once CUDA starts.
Does not cover: bringing this into a child's Python (rescue).

Nothing is done before the script itself starts CUDA: a limit set at import would make a context in every data-loading
worker, and forked children could not use CUDA any more. Launchers that start a process a card say which is ours in
LOCAL_RANK; otherwise it is the current device when CUDA starts. Other devices of the same process are not bounded.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

from legroom.errors import BadLimit, LegroomError
from legroom.gpu.amounts import ANY_CARD, asked_bytes
from legroom.gpu.cap import limit_card
from legroom.gpu.card import Card, import_torch
from legroom.units import format_size
from legroom.words import say

VARIABLE = "LEGROOM_GPU_LIMIT"
_NO_CARD = 1 << 20  # bytes: who gives fewer means another unit


def with_limit(environment: Mapping[str, str], amount: str) -> dict[str, str]:
    """The environment with a limit for whatever is started in it; BadLimit for one that makes no sense."""
    asked = asked_bytes(amount, None, ANY_CARD)
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
        made = limit_card(Card(torch, index), amount)
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
