"""Which of a loader's parts cannot reach its workers.

Covers: trying each, and the error. Does not cover: noticing that something could not be sent (dataloader.py).
"""

from __future__ import annotations

from multiprocessing.reduction import ForkingPickler
from typing import Any

from legroom.errors import Unpicklable
from legroom.loader.collate import Carried
from legroom.words import say


def unpicklable(dataset: Any, collate_fn: Any, worker_init_fn: Any) -> Unpicklable | None:
    """The error about the first that cannot be pickled; None where that is not what is wrong."""
    function = collate_fn.fn if isinstance(collate_fn, Carried) else collate_fn
    parts = {"dataset": dataset, "collate_fn": function, "worker_init_fn": worker_init_fn}
    for name, part in parts.items():
        try:
            ForkingPickler.dumps(part)
        except Exception as inner:
            return Unpicklable(
                say("the {name} cannot be sent to worker processes", name=name),
                why=say("{kind} is pickled for every worker, and: {problem}", kind=type(part), problem=inner),
                fix=(
                    say("define it at the top level of a module: no lambdas, no functions inside functions"),
                    say("open files and connections in worker_init_fn or at first use, not in __init__"),
                    say("multiprocessing_context='fork' sends nothing"),
                ),
            )
    return None
