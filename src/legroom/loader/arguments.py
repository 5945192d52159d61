"""Arguments of a loader that cannot be meant.

Covers: those that torch refuses in one line, said with a reason and what to do. Does not cover: everything else that
torch checks, which is torch's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.errors import BadArgument
from legroom.words import say


def check_arguments(
    batch_size: Any, num_workers: Any, shuffle: Any, sampler: Any, options: Mapping[str, Any]
) -> None:
    """Raise BadArgument, a ValueError as torch's is, for what makes no loader."""
    if _whole(batch_size) and batch_size < 1:
        raise BadArgument(
            say("batch_size={size} makes no batches", size=batch_size),
            why=say("a batch has at least one sample"),
            fix=(
                say("give a batch_size of 1 or more"),
                say("batch_size=None gives the samples as they are, without batches"),
            ),
        )
    if _whole(num_workers) and num_workers < 0:
        raise BadArgument(
            say("num_workers={workers} cannot be", workers=num_workers),
            why=say("it is how many worker processes make batches"),
            fix=(say("num_workers=0 makes them in this process"),),
        )
    asked = {
        "prefetch_factor": options.get("prefetch_factor") is not None,
        "persistent_workers": bool(options.get("persistent_workers")),
    }
    for name, given in asked.items():
        if num_workers == 0 and given:
            raise BadArgument(
                say("{name} means nothing without workers", name=name),
                why=say("{name}={value!r} with num_workers=0", name=name, value=options[name]),
                fix=(say("give num_workers of 1 or more"), say("or leave {name} out", name=name)),
            )
    if sampler is not None and shuffle:
        raise BadArgument(
            say("sampler and shuffle=True exclude each other"),
            why=say("both decide the order, and {kind} was given", kind=type(sampler).__name__),
            fix=(say("leave shuffle out"), say("or leave the sampler out")),
        )


def _whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)
