"""A batch on its way: what a worker puts into its queue.

Covers: how it is pickled. Does not cover: what was written where (arena/pack.py), its arrival (arena/inbox.py).
"""

from __future__ import annotations

from typing import Any

from legroom.loader.arena import door
from legroom.loader.arena.descriptors import Descriptors
from legroom.loader.arena.inbox import receive
from legroom.system.libc import malloc_trim


class Sent:
    """Pickled, it is a few numbers and the batch without its bytes; to do so twice has no effect."""

    __slots__ = ("_arguments",)

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    def hand_over(self, descriptors: Descriptors) -> None:
        """Send its slot's descriptor ahead, so that it is there when this arrives."""
        fd, number = self._arguments[1:3]
        if fd >= 0:
            descriptors.send(number, fd)

    def __reduce__(self) -> tuple[Any, ...]:
        # Right before it is written, when the samples are gone and the next ones are about to be drawn.
        if door.here() is not None:
            malloc_trim()
        return receive, self._arguments
