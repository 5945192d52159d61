"""How much is decoded at a time, and giving back what an allocator keeps.

Covers: rows of a step from its bytes, and returning freed memory before it is too much. Does not cover: reading.

What Arrow frees stays with its allocator, with strings several times what is in use; asked to, mimalloc returns it.
Memory that was returned must be faulted in again, which can cost as much as decoding does, so it is returned only
when the process has grown by half the bound, and then again after each further quarter. Where the process's size cannot
be read, what was decoded since stands for what may be kept.
"""

from __future__ import annotations

import os
from collections.abc import Callable

from legroom.system.imports import require

_MOST_ROWS = 1 << 16
_LOOKS = 32  # at the process's size, while as much is decoded as the bound


class Steps:
    """The size of steps, and the watch over what the process keeps."""

    def __init__(self, nbytes: int, batch_size: int, memory: int) -> None:
        self._nbytes, self._batch_size, self._memory = nbytes, batch_size, memory
        self._pool = require("pyarrow", "parquet", "Parquet").default_memory_pool()
        self._since = 0
        size = resident()
        self._limit = None if size is None else size + memory // 2

    def rows(self, row_bytes: int) -> int:
        """Rows of a step: whole batches where several fit, so that few batches must be joined from two steps."""
        rows = max(1, min(_MOST_ROWS, self._nbytes // max(1, row_bytes)))
        return rows - rows % self._batch_size if rows > self._batch_size else rows

    def read(self, nbytes: int) -> None:
        """So much was decoded."""
        self._since += nbytes
        if self._limit is None:
            if self._since > self._memory // 8:
                self._since = 0
                self._pool.release_unused()
        elif self._since > self._memory // _LOOKS:
            self._since = 0
            if (resident() or 0) > self._limit:
                self._pool.release_unused()
                # What is there now is in use, or is not ours: only further growth is looked at again.
                self._limit = max(self._limit, (resident() or 0) + self._memory // 4)


def resident(read: Callable[[str], bytes] | None = None) -> int | None:
    """Bytes of this process that are in memory; None where the system does not say."""
    try:
        text = (read or _contents)("/proc/self/statm")
        return int(text.split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError, AttributeError):
        return None


def _contents(path: str) -> bytes:
    with open(path, "rb", buffering=0) as file:
        return file.read()
