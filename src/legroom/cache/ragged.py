"""Rows of different lengths, and texts, as they lie in an entry: offsets and values.

Covers: reading them row by row without copying. Does not cover: storing them (formats describes them as two
arrays, and so they are stored).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, overload

import numpy as np

NDArray = np.ndarray[Any, Any]


class Ragged(Sequence[Any]):
    """A sequence of arrays, or of texts; ``offsets`` and ``values`` are the shared arrays themselves."""

    def __init__(
        self, offsets: NDArray, values: NDArray, *, text: bool, shape: tuple[int, ...] | None = None
    ) -> None:
        self.offsets, self.values, self.text = offsets, values, text
        self.shape = shape or (max(0, len(offsets) - 1),)  # of the rows; they are counted in C order

    def __len__(self) -> int:
        return max(0, len(self.offsets) - 1)

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, slice):
            return [self[row] for row in range(*index.indices(len(self)))]
        if isinstance(index, tuple):
            index = int(np.ravel_multi_index(index, self.shape))
        row = index.__index__()
        if row < 0:
            row += len(self)
        if not 0 <= row < len(self):
            raise IndexError(index)
        part = self.values[int(self.offsets[row]) : int(self.offsets[row + 1])]
        return part.tobytes().decode("utf-8") if self.text else part

    def __repr__(self) -> str:
        kind = "texts" if self.text else f"rows of {self.values.dtype}"
        return f"<Ragged: {len(self)} {kind}>"
