"""How a column's rows are moved on a CUDA device: as the widest integers they divide by.

Covers: the width, the tensors' types, turning moved rows back into what they are. Does not cover: moving them.

A row is so many bytes, whatever it means. Gathered eight at a time they cross PCIe at its full speed; rows with an
odd number of bytes go one by one, which is slower. Types that torch does not have cannot be batches of tensors.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Any

import numpy as np

from legroom.errors import UnsupportedData
from legroom.words import say

if TYPE_CHECKING:
    import torch

NDArray = np.ndarray[Any, Any]
_WIDTHS = (8, 4, 2, 1)


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one column."""

    count: int
    shape: tuple[int, ...]  # of one row
    nbytes: int  # of one row
    dtype: torch.dtype

    def width(self, address: int) -> int:
        """The widest integer that divides a row and the place where the first one lies."""
        return next(width for width in _WIDTHS if self.nbytes % width == 0 and address % width == 0)

    def words(self, array: NDArray) -> NDArray:
        """The column, which is contiguous, as rows of integers; nothing is copied."""
        width = self.width(array.ctypes.data)
        kind = np.dtype(f"i{width}" if width > 1 else "u1")
        return array.reshape(-1).view(kind).reshape(self.count, self.nbytes // width)

    def restore(self, words: torch.Tensor) -> torch.Tensor:
        """Gathered rows of integers as what they are; nothing is copied."""
        return words.view(self.dtype).view(len(words), *self.shape)

    def empty(self, count: int, device: torch.device) -> torch.Tensor:
        """Room for some rows."""
        import torch

        return torch.empty((count, *self.shape), dtype=self.dtype, device=device)


def rows_of(name: str, column: NDArray) -> Rows:
    """How the rows of a column are moved; UnsupportedData where torch has no such type."""
    import torch

    shape = column.shape[1:]
    try:
        dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    except (TypeError, ValueError) as problem:
        raise UnsupportedData(
            say("{name} cannot be on a CUDA device", name=name),
            why=say("torch {version} has no type for {dtype}", version=torch.__version__, dtype=column.dtype),
            fix=(say("leave it out: keys=(…)"), say("format='numpy' gives it as it is")),
        ) from problem
    return Rows(len(column), shape, prod(shape) * column.dtype.itemsize, dtype)
