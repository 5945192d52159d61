"""Memory for batches, used again once nobody has it any more.

Covers: page-aligned buffers and their lifetime. Does not cover: what is written into them, pinned memory (cuda).

A batch's array lies on a block through a Lease: the array (and any view, slice or tensor of it) keeps the Lease alive,
and when the last of them dies the Lease puts the block back. A consumer that keeps its batches therefore simply gets
new memory. Blocks are private memory of one process, so a forked child that drops its batches gives back its own copy.

The block that came back last is used first: it is the one most likely to be in the CPU's cache still. A destination
that begins off a page boundary is written at a third of the speed (8 against 22 GB/s), so blocks begin on one.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import numpy as np

NDArray = np.ndarray[Any, Any]
_PAGE = 4096
_KEPT = 4  # free blocks: one being consumed, one ready, one being filled, one to spare


class Buffers:
    """Equal blocks of memory, as many as are in use at once."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        # Bounded: what a consumer kept and drops all at once goes back to the system. Appending and popping are
        # single steps, so that a Lease may die in any thread, between any two lines.
        self._free: deque[_Block] = deque(maxlen=_KEPT)

    def take(self, nbytes: int) -> NDArray:
        """The first ``nbytes`` bytes of a block that is nobody's, as uint8; it is the caller's until the array dies."""
        try:
            block = self._free.pop()
        except IndexError:
            block = _Block(np.empty(self.nbytes + _PAGE, np.uint8))
        return np.asarray(_Lease(block, nbytes, self._free))


class _Block:
    """Memory, and where its first page begins: found once, because numpy takes a microsecond to say it."""

    __slots__ = ("_memory", "start")

    def __init__(self, memory: NDArray) -> None:
        self._memory = memory
        address = memory.ctypes.data
        self.start = address + -address % _PAGE


class _Lease:
    """What a batch's array says its memory belongs to."""

    __slots__ = ("__array_interface__", "_block", "_free")

    def __init__(self, block: _Block, nbytes: int, free: deque[_Block]) -> None:
        self._block, self._free = block, free
        self.__array_interface__ = {
            "version": 3,
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (block.start, False),
        }

    def __del__(self) -> None:
        self._free.append(self._block)
