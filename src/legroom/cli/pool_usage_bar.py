"""One memory pool on one line, with a bar: how full it is, yellow and then red where it is nearly full."""

from __future__ import annotations

import sys

from legroom.cli.text_layout import labelled, paint
from legroom.messages import say
from legroom.records.finding_and_alarm import Severity
from legroom.records.machine import Pool
from legroom.units import format_size

YELLOW, RED = 0.8, 0.95  # shares of a pool in use from which its bar has that colour
BAR = 20


def bar(share: float) -> str:
    """A share as a bar of twenty cells; at least one cell for anything above zero."""
    share = min(1.0, max(0.0, share))
    full = round(share * BAR)
    if share > 0 and full == 0:
        full = 1
    blocks = "█░" if (sys.stdout.encoding or "").lower().startswith("utf") else "#."
    return blocks[0] * full + blocks[1] * (BAR - full)


def pool_line(pool: Pool, plain: bool) -> str:
    """One memory pool on one line; for an unknown one the reason."""
    label = f"  {pool.name:<7}"
    share = pool.used_share
    if pool.size is None:
        return labelled(label, say("unknown: {reason}", reason=pool.reason or pool.source))
    if pool.size == 0:
        return label + say("none")
    if pool.name == "fds":
        return label + say("{size} open files per process", size=pool.size)
    if share is None or pool.used is None or pool.free is None:
        known = say("{size} in total", size=format_size(pool.size))
        if pool.free is not None:
            known = say("{free} of {size} free", free=format_size(pool.free), size=format_size(pool.size))
        return labelled(label, say("{what}; {source}", what=known, source=pool.reason or pool.source))
    severity: Severity | None = "critical" if share >= RED else "warning" if share >= YELLOW else None
    figures = say(
        "{used:>8} of {size:>8} used, {free} free",
        used=format_size(pool.used), size=format_size(pool.size), free=format_size(pool.free),
    )  # fmt: skip
    if plain:
        return label + say("{share:.0%} used: ", share=share) + " ".join(figures.split())
    return label + paint(bar(share), severity) + f" {share:>4.0%} {figures}"
