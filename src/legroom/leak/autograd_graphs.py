"""How far back an autograd graph reaches: a sum of losses that is never detached keeps the graph of every step.

Nodes are numbered in the order of their creation, so the way to the oldest node leads along the smallest numbers. What
a graph contained at the last reading is not walked again.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import Any

_MOST_NODES = 3000  # of one reading
_NOT_NUMBERED = 1 << 62  # the nodes that add gradients to parameters have the largest number


@dataclass
class GraphReach:
    """Reads the graphs of the same variables again and again."""

    _last: dict[Any, tuple[int, int]] = field(default_factory=dict)  # by variable: number of the last node, reach

    def read(self, key: object, tensor: Any) -> int | None:
        """The number of nodes between the newest and the oldest one that the tensor keeps; None if unreadable."""
        try:
            found = self._read(key, tensor.grad_fn)
        except (AttributeError, RuntimeError):
            return None
        return found

    def _read(self, key: object, root: Any) -> int:
        newest = int(root._sequence_nr())
        before, reached = self._last.get(key, (-1, 0))
        if newest == before:
            return reached
        oldest, waiting, seen, number = newest, [(newest, 0, root)], {id(root)}, 0
        kept = [root]  # ids are only distinct while the objects live
        while waiting and number < _MOST_NODES:
            number += 1
            at, _, node = heapq.heappop(waiting)
            if at == before:
                oldest = before - reached
                break
            if at < _NOT_NUMBERED:
                oldest = min(oldest, at)
            for child, _ in node.next_functions:
                if child is not None and id(child) not in seen:
                    seen.add(id(child))
                    kept.append(child)
                    order = int(child._sequence_nr())
                    if order < _NOT_NUMBERED:
                        heapq.heappush(waiting, (order, len(kept), child))
        self._last[key] = newest, newest - oldest
        return newest - oldest


def saved_bytes(tensor: Any, most: int = 1500) -> int | None:
    """Bytes of the tensors that the graph of one tensor has saved for backward, about; None if it cannot be read."""
    waiting, seen, addresses = [tensor.grad_fn], set[int](), dict[int, int]()
    kept: list[Any] = []
    while waiting and len(kept) < most:
        node = waiting.pop()
        if node is None or id(node) in seen:
            continue
        seen.add(id(node))
        kept.append(node)
        for word in dir(node):
            if word.startswith("_saved_"):
                try:
                    value = getattr(node, word)
                    values = value if isinstance(value, tuple) else (value,)
                    for one in values:
                        if hasattr(one, "untyped_storage") and not (one.is_leaf and one.requires_grad):
                            storage = one.untyped_storage()
                            addresses[storage.data_ptr()] = int(storage.nbytes())
                except Exception:  # freed by backward, or of another kind
                    continue
        waiting.extend(child for child, _ in getattr(node, "next_functions", ()))
    return sum(addresses.values())


def tensor_with_graph(thing: Any) -> Any:
    """The tensor with an autograd graph in an item, or None."""
    parts = [thing]
    if isinstance(thing, dict):
        parts = list(thing.values())[:16]
    elif isinstance(thing, (list, tuple)):
        parts = [
            *thing[:16],
            *(value for one in thing[:4] if isinstance(one, dict) for value in list(one.values())[:16]),
        ]
    return next((one for one in parts if getattr(one, "grad_fn", None) is not None), None)
