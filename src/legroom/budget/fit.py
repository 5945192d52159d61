"""Need against Box: does it fit, and which pool breaks first.

Covers: the verdict, every pool that is too small and by how much. Does not cover: computing the need (predict.py),
settings that would fit (largest.py), sizes to ask for (sizing.py).

Pure. What is free now is what counts: others' use is in it already. A pool that is needed and whose room is unknown
makes the answer unknown, unless another pool is too small anyway.
"""

from __future__ import annotations

from legroom.budget.relief import relieve
from legroom.model import Box, Fit, Need, Plan, Pool, Problem
from legroom.units import format_size
from legroom.words import say

_COUNTED = ("shm", "ram", "fds", "disk")


def fit(need: Need, box: Box) -> Plan:
    """The verdict, the worst pool first."""
    asked = {name: getattr(need, name) for name in _COUNTED}
    problems: list[Problem] = []
    unknown: dict[str, str] = {}
    for name, amount in asked.items():
        _judge(box, name, amount, _room(box, name), problems, unknown)
    if need.gpu:
        for pool in _cards(box):
            _judge(box, pool.name, need.gpu, pool.free, problems, unknown)
        if not _cards(box):
            unknown["gpu"] = box.gpus.reason or say("no card could be read")
    problems.sort(key=lambda problem: -(problem.need / max(1, problem.free)))
    verdict: Fit = "too-big" if problems else "unknown" if unknown else "fits"
    fix = problems[0].fix if problems else ()
    return Plan(need=need, verdict=verdict, problems=tuple(problems), unknown=unknown, fix=fix)


def _judge(
    box: Box, name: str, amount: int, room: int | None, problems: list[Problem], unknown: dict[str, str]
) -> None:
    if not amount:
        return
    pool = box.pool(name)
    if room is None:
        unknown[name] = (pool.reason or pool.source) if pool else say("this box has no such pool")
    elif amount > room:
        problems.append(Problem(name, amount, room, _message(name, amount, room), relieve(box, name, amount)))


def _room(box: Box, name: str) -> int | None:
    """What may still be taken; descriptors are each process's own, so there the whole limit."""
    pool = box.pool(name)
    if pool is None:
        return None
    return pool.size if name == "fds" and pool.free is None else pool.free


def _cards(box: Box) -> list[Pool]:
    return [pool for pool in box.pools if pool.name.startswith("gpu")]


def _message(name: str, amount: int, room: int) -> str:
    if name == "fds":
        return say("{amount} descriptors needed, {room} allowed", amount=amount, room=room)
    return say(
        "{name}: {amount} needed, {room} free, {missing} too little",
        name=name, amount=format_size(amount), room=format_size(room), missing=format_size(amount - room),
    )  # fmt: skip
