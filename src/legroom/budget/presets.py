"""How far settings may go: the share of what is free, and the most workers.

Covers: the presets and the headroom that applies without one. Does not cover: choosing inside those bounds (choose.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from legroom.errors import UsageError
from legroom.model import Box
from legroom.words import say

_SHARED = ("shm", "ram", "pinned")  # what others take from as well


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds for a choice."""

    name: str
    share: float  # of what each pool has free now
    most_workers: int | None = None  # None: as many as pay
    persistent: bool = True
    why: str = ""


DEFAULT = Preset("none", 0.8, why="a fifth of what is free stays for kept batches and for others")
PRESETS = {
    "development": Preset(
        "development", 0.25, most_workers=1, persistent=False,
        why="a quarter of what is free and one worker: starts and stops quickly beside an editor and a browser",
    ),
    "production": Preset(
        "production", 0.6, why="three fifths of what is free: a long run meets peaks that a short measurement does not"
    ),
    "cluster": Preset(
        "cluster", 0.9, why="nine tenths of what is free: the scheduler's limit is this job's alone"
    ),
}  # fmt: skip


def preset(name: str | None) -> Preset:
    """The bounds of that name; those without a name leave a fifth free."""
    if name is None:
        return DEFAULT
    if name not in PRESETS:
        raise UsageError(
            say("no preset is called {name!r}", name=name),
            why=say("there are {names}", names=", ".join(PRESETS)),
            fix=(say("name one of them, or none"),),
        )
    return PRESETS[name]


def within(box: Box, bounds: Preset) -> Box:
    """The box with only the share of its free memory that the bounds allow."""
    return replace(
        box,
        pools=tuple(
            replace(pool, free=int(pool.free * bounds.share))
            if pool.name in _SHARED and pool.free is not None
            else pool
            for pool in box.pools
        ),
    )
