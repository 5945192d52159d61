"""Settings set by hand, completed so that the effective batch stays what it was.

Covers: the other half of batch and accumulation, a prefetch for workers that had none. Does not cover: which values are
possible at all (settings_env.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.words import say

TOGETHER = ("batch_size", "accumulation")  # one is nothing without the other
_PREFETCH = 2  # torch's own default


def completed(now: Mapping[str, Any], by_hand: Mapping[str, Any]) -> dict[str, Any]:
    """``by_hand`` with what follows from it; an error where the effective batch would change."""
    wanted = dict(by_hand)
    if wanted.get("ranks", now["ranks"]) != now["ranks"]:
        raise UsageError(
            say(
                "{ranks} ranks set by hand, {found} in the request", ranks=wanted["ranks"], found=now["ranks"]
            ),
            why=say("the effective batch depends on it"),
            fix=(say("give the number of ranks as such, not as an override"),),
        )
    step = now["batch_size"] * now["accumulation"]
    for given, other in (TOGETHER, TOGETHER[::-1]):
        if given in wanted and other not in wanted and step % wanted[given] == 0:
            wanted[other] = step // wanted[given]
    batch, times = (wanted.get(name, now[name]) for name in TOGETHER)
    if batch * times != step:
        old, new = (samples * now["ranks"] for samples in (step, batch * times))
        raise UsageError(
            say("batch {batch} × accumulation {times} would change the effective batch", batch=batch, times=times),
            why=say(
                "{batch} × {times} × {ranks} ranks = {new}, and {old} was asked for",
                batch=batch, times=times, ranks=now["ranks"], new=new, old=old,
            ),
            fix=(say("ask for an effective batch of {new} if that is meant", new=new),),
        )  # fmt: skip
    if wanted.get("num_workers", now["num_workers"]) == 0:
        wanted.pop("prefetch_factor", None)
    elif wanted.get("prefetch_factor", now["prefetch_factor"]) is None:
        wanted["prefetch_factor"] = _PREFETCH
    return wanted
