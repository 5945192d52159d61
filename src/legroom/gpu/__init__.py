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
    from legroom.gpu.batch_size import find_batch_size
    from legroom.gpu.memory_account import account
    from legroom.gpu.memory_estimate import advise, estimate
    from legroom.gpu.memory_limit import limit
    from legroom.gpu.oom import is_oom, on_oom
    from legroom.gpu.tf32_flags import tf32

__all__ = ["account", "advise", "estimate", "find_batch_size", "is_oom", "limit", "on_oom", "plot", "tf32"]

_HOMES = {
    "account": "legroom.gpu.memory_account",
    "advise": "legroom.gpu.memory_estimate",
    "estimate": "legroom.gpu.memory_estimate",
    "find_batch_size": "legroom.gpu.batch_size",
    "is_oom": "legroom.gpu.oom",
    "limit": "legroom.gpu.memory_limit",
    "on_oom": "legroom.gpu.oom",
    "plot": "legroom.charts.batch_chart",
    "tf32": "legroom.gpu.tf32_flags",
}


def __getattr__(name: str) -> object:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'legroom.gpu' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(home), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
