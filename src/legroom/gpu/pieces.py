"""A batch, counted and cut.

Covers: nests of dicts, lists, tuples and named tuples whose tensors have the samples in front.
Does not cover: anything else a batch may be; its owner brings a way to cut it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from legroom.errors import UsageError
from legroom.words import say


def samples(batch: Any) -> int:
    """How many samples a batch holds: the length of its tensors' first dimension; without tensors, its own."""
    lengths = sorted({len(one) for one in _tensors(batch) if one.ndim})
    if len(lengths) == 1:
        return lengths[0]
    if not lengths and hasattr(batch, "__len__"):
        return len(batch)
    raise UsageError(
        say("the samples of the batch cannot be counted"),
        why=say("its tensors' first dimensions are {lengths}", lengths=lengths)
        if lengths
        else say("there is no tensor in a {kind}, and it has no length", kind=type(batch).__name__),
        fix=(
            say("put samples in front in every tensor; or give cut=, and a batch whose len() counts samples"),
        ),
    )


def pieces(batch: Any, size: int) -> list[Any]:
    """The batch in pieces of ``size`` samples, the last one smaller; views, not copies."""
    return [_part(batch, start, start + size) for start in range(0, samples(batch), size)]


def _tensors(value: Any) -> list[Any]:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return [value]
    members = (
        value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    )
    return [one for member in members for one in _tensors(member)]


def _part(value: Any, start: int, stop: int) -> Any:
    if hasattr(value, "ndim") and hasattr(value, "shape"):
        return value[start:stop] if value.ndim else value
    if isinstance(value, Mapping):
        return {key: _part(one, start, stop) for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        parts = [_part(one, start, stop) for one in value]
        if hasattr(value, "_fields"):
            return type(value)(*parts)
        return type(value)(parts)
    return value
