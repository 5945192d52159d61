"""GPU memory within bounds.

Covers: limits, precision, batch size, accounting, advice and estimates.
Does not cover: batches on their way to the GPU (loader).

    cap.py         limit             accounting.py  account
    precision.py   tf32              advising.py    advise
    finder.py      find_batch_size   estimating.py  estimate
    survive.py     on_oom            drawing.py     plot

The names are imported when they are first used, and torch when they are first called.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from legroom.charts.batch_chart import plot
    from legroom.gpu.accounting import account
    from legroom.gpu.advising import advise
    from legroom.gpu.cap import limit
    from legroom.gpu.estimating import estimate
    from legroom.gpu.finder import find_batch_size
    from legroom.gpu.oom import is_oom
    from legroom.gpu.precision import tf32
    from legroom.gpu.survive import on_oom

__all__ = ["account", "advise", "estimate", "find_batch_size", "is_oom", "limit", "on_oom", "plot", "tf32"]

_HOMES = {
    "account": "legroom.gpu.accounting",
    "advise": "legroom.gpu.advising",
    "estimate": "legroom.gpu.estimating",
    "find_batch_size": "legroom.gpu.finder",
    "is_oom": "legroom.gpu.oom",
    "limit": "legroom.gpu.cap",
    "on_oom": "legroom.gpu.survive",
    "plot": "legroom.charts.batch_chart",
    "tf32": "legroom.gpu.precision",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'legroom.gpu' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
