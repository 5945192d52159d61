"""How far settings may go: the share of what is free, and the most workers.

Covers: the presets and the headroom that applies without one. Does not cover: choosing inside those bounds (choose.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from legroom.errors import UsageError
from legroom.model import Box
from legroom.words import listed, say

_SHARED = ("shm", "ram", "pinned")  # what others take from as well


@dataclass(frozen=True, slots=True)
class Preset:
    """Bounds for a choice."""

    name: str
    share: float  # of what each pool has free now
    most_workers: int | None = None  # None: as many as pay
    persistent: bool = True


# A fifth stays for kept batches and for others.
DEFAULT = Preset("none", 0.8)
PRESETS = {
    # Starts and stops quickly beside an editor and a browser.
    "development": Preset("development", 0.25, most_workers=1, persistent=False),
    # A long run meets peaks that a short measurement does not.
    "production": Preset("production", 0.6),
    # The scheduler's limit is this job's alone.
    "cluster": Preset("cluster", 0.9),
}


def preset(name: str | None) -> Preset:
    """The bounds of that name; those without a name leave a fifth free."""
    if name is None:
        return DEFAULT
    if name not in PRESETS:
        raise UsageError(
            say("no preset is called {name!r}", name=name),
            why=say("there are {names}", names=listed(PRESETS)),
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
