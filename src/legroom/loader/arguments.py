"""What torch refuses about a loader's arguments, with a reason and what to do.

torch's own sentence stays the first: it is what people search for. What is not in the table is torch's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.errors import BadArgument
from legroom.words import say


def explained(problem: ValueError, given: Mapping[str, Any]) -> BadArgument | None:
    """torch's error as BadArgument, a ValueError too; None where there is nothing to add."""
    said = str(problem)
    for words, explain in _KNOWN.items():
        if words in said:
            why, fix = explain(given)
            return BadArgument(said, why=why, fix=fix)
    return None


Explanation = tuple[str, tuple[str, ...]]


def _batch_size(given: Mapping[str, Any]) -> Explanation:
    return say("a batch has at least one sample; batch_size={size!r}", size=given["batch_size"]), (
        say("give a batch_size of 1 or more"),
        say("batch_size=None gives the samples as they are, without batches"),
    )


def _num_workers(given: Mapping[str, Any]) -> Explanation:
    return say(
        "num_workers is the number of worker processes; num_workers={count}", count=given["num_workers"]
    ), (say("num_workers=0 makes batches in this process"),)


def _prefetch_factor(given: Mapping[str, Any]) -> Explanation:
    return _needs_workers("prefetch_factor", given)


def _persistent_workers(given: Mapping[str, Any]) -> Explanation:
    return _needs_workers("persistent_workers", given)


def _needs_workers(name: str, given: Mapping[str, Any]) -> Explanation:
    return say("{name}={value!r} with num_workers=0", name=name, value=given.get(name)), (
        say("give num_workers of 1 or more"),
        say("or leave {name} out", name=name),
    )


def _sampler(given: Mapping[str, Any]) -> Explanation:
    kind = type(given["sampler"]).__name__
    return say("both decide the order, and {kind} was given", kind=kind), (
        say("leave shuffle out"),
        say("or leave the sampler out"),
    )


_KNOWN = {  # words of torch's sentence
    "batch_size should be a positive integer value": _batch_size,
    "num_workers option should be non-negative": _num_workers,
    "prefetch_factor option could only be specified in multiprocessing": _prefetch_factor,
    "persistent_workers option needs num_workers > 0": _persistent_workers,
    "sampler option is mutually exclusive with shuffle": _sampler,
}
