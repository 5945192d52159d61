"""Every tensor that comes and goes during a step, counted as torch's allocator would.

Covers: bytes alive now and at the peak, for real tensors and for fake ones, on any device.
Does not cover: work space that libraries take inside one operation (cuDNN, cuBLAS), which no tensor shows.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

_BLOCK = 512  # torch's allocator gives out multiples of this


def rounded(size: int) -> int:
    """What the allocator sets aside for a request."""
    return -(-size // _BLOCK) * _BLOCK


class Tracker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is active, sees every operation's results; what was there before is told by ``add``."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.now = self.peak = 0
        self._seen: set[int] = set()
        self._serial = 0

    def add(self, tensors: Iterable[Any]) -> int:
        """Count these, if they are not counted yet; gives the bytes that came in."""
        before = self.now
        for one in tensors:
            if isinstance(one, torch.Tensor) and one.layout == torch.strided:
                self._count(one.untyped_storage())
        self.peak = max(self.peak, self.now)
        return self.now - before

    def _count(self, storage: Any) -> None:
        key = storage._cdata
        size = rounded(storage.nbytes())
        if key in self._seen or not size:
            return
        self._seen.add(key)
        self.now += size
        weakref.finalize(storage, self._gone, key, size).atexit = False

    def _gone(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.now -= size

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.add(tree_leaves(result))
        return result
