"""In which order an epoch goes through the rows.

Covers: the permutation of an epoch. Does not cover: which rank gets which part of it (share.py).

The order is a function of (rows, seed, epoch) and of nothing else: every rank computes it for itself, and a resumed
run computes it again. Every row gets 64 bits of Philox under the key (seed, epoch), the low ones replaced by its own
number, and the rows are sorted by that. numpy promises that a bit generator's raw stream never changes, which it
does not promise for ``permutation`` and ``shuffle``; and as no two keys are equal, every sort gives the same result.
(Two rows whose random bits agree stay in ascending order: of a million rows, that is one pair in thirty epochs.)
"""

from __future__ import annotations

from typing import Any

import numpy as np

NDArray = np.ndarray[Any, Any]


def permutation(rows: int, seed: int, epoch: int) -> NDArray:
    """The row numbers 0 … rows-1 in the order of that epoch, as int64."""
    keys = np.random.Philox(key=np.array([seed, epoch], np.uint64)).random_raw(rows)
    numbers = np.uint64((1 << max(0, rows - 1).bit_length()) - 1)
    keys &= ~numbers
    keys |= np.arange(rows, dtype=np.uint64)
    keys.sort()
    keys &= numbers
    return keys.view(np.int64)
