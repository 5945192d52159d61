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
