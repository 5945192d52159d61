"""A stream as torch sees it.

Covers: being an IterableDataset where torch is in use, and which worker of how many this process is.
Does not cover: anything of torch's loaders.
"""

from __future__ import annotations

import sys
from functools import cache
from typing import Any

from legroom.system.imports import require
from legroom.words import say


def iterable_class(plain: Any) -> Any:
    """``plain``, and torch's IterableDataset too if the program has imported torch."""
    return torch_class(plain) if "torch.utils.data" in sys.modules else plain


@cache
def torch_class(plain: Any) -> Any:
    """``plain`` and torch's IterableDataset in one class."""
    data = require("torch.utils.data", "torch", say("streams as torch datasets"))
    return type(plain.__name__, (plain, data.IterableDataset), {"__module__": plain.__module__})


def this_worker() -> tuple[int, int]:
    """(worker, workers) of the DataLoader this process works for; 0 of 1 where it works for none."""
    data = sys.modules.get("torch.utils.data")
    found = None if data is None else data.get_worker_info()
    return (0, 1) if found is None else (found.id, found.num_workers)
